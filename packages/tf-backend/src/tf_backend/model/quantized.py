"""That a checkpoint is quantized, told from its configuration alone, however complete that is.

In: values of a config, or the folder of a checkpoint. Out: where it is said and by which method; a refusal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tf_backend.model.config import read_values
from tf_backend.plan.schema import Place, Refusal

FIELDS = ("quantization_config", "compression_config")
"""Fields of a config in which checkpoints say how they are quantized; the second one is of older compressed-tensors."""
_BESIDE = "hf_quant_config.json"
"""A file of its own, of older ModelOpt."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Where a checkpoint says that it is quantized, and by which method, if it says that."""

    said_in: str
    method: str

    def refusal(self, architecture: str, place: Place | None = None) -> Refusal:
        """Why such a checkpoint is not served."""
        by = f" by `{self.method}`" if self.method else ""
        return Refusal(
            f"`{architecture}` has a checkpoint that is quantized{by} ({self.said_in}), which is not served yet",
            "",
            place,
            "Use one that is not quantized, or `--model-impl vllm`.",
        )


def quantization_of(values: Mapping[str, Any], file: object = "config.json") -> Quantization | None:
    """What the config, or the config of its text model, says."""
    text = values.get("text_config")
    holders: list[tuple[str, Mapping[str, Any]]] = [("", values)]
    holders += [("text_config.", text)] if isinstance(text, Mapping) else []
    for prefix, holder in holders:
        for field in FIELDS:
            found = holder.get(field)
            if found is not None:
                method = found.get("quant_method") if isinstance(found, Mapping) else None
                return Quantization(f'"{prefix}{field}" in {file}', method if isinstance(method, str) else "")
    return None


def quantization_in(folder: Path) -> Quantization | None:
    """What the files of a checkpoint say; ConfigError where its config.json cannot be read."""
    file = folder / "config.json"
    found = quantization_of(read_values(file), file)
    return found or (Quantization(str(folder / _BESIDE), "") if (folder / _BESIDE).is_file() else None)
