"""A checkpoint folder against a plan, before the engine starts: nothing but names and headers is read.

In: a folder, a plan, vLLM's load format. Out: the loader for it, or a `CheckpointError` that names what is missing, cut short or misshapen.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from tf_backend.errors import CheckpointError
from tf_backend.weights.files import stored_tensors
from tf_backend.weights.load import WeightLoader

if TYPE_CHECKING:
    from tf_backend.plan.planner import Planned

_SUFFIXES: dict[str, tuple[str, ...]] = {
    "auto": (".safetensors", ".bin", ".pt"),
    "hf": (".safetensors", ".bin", ".pt"),
    "safetensors": (".safetensors",),
    "fastsafetensors": (".safetensors",),
    "instanttensor": (".safetensors",),
    "pt": (".pt",),
    "npcache": (".bin", ".pt"),
}
"""What vLLM's loader looks for under each load format that reads a folder's own files. Other formats make, fetch or stream weights."""


def weight_loader(planned: Planned) -> WeightLoader:
    """The loader of a planned model's checkpoints; it also knows what a checkpoint may hold that the model does not want."""
    plan = planned.plan
    return WeightLoader(
        plan.weights,
        plan.base,
        ignorable=plan.buffers,
        ignorable_patterns=planned.ignorable_patterns,
        tied=planned.tied,
        conversion=planned.conversion,
        integers=planned.integers,
    )


def check_checkpoint(folder: Path, planned: Planned, load_format: str = "auto") -> WeightLoader:
    """Hold the checkpoint in `folder` against the plan. Formats that do not read a folder's files (`dummy`) pass.

    Returns:
        The loader for it, which knows all names of the checkpoint where they were read.

    Raises:
        CheckpointError: the folder has no weight file, a file is absent, cut short or malformed, or a tensor is missing, left over or
            of another shape. Files that are no safetensors are checked when they are loaded.
    """
    loader = weight_loader(planned)
    suffixes = _SUFFIXES.get(load_format)
    if suffixes is None:
        return loader
    _check_not_empty(folder, suffixes)
    if load_format == "auto":
        _check_no_other_copy(folder)
    stored = stored_tensors(folder) if ".safetensors" in suffixes else {}
    if stored:
        loader.check(stored)
    return loader


def _check_not_empty(folder: Path, suffixes: Collection[str]) -> None:
    if not any(path.suffix in suffixes for path in folder.iterdir()):
        wanted = " or ".join(f"*{suffix}" for suffix in suffixes)
        raise CheckpointError(
            "a folder holds no weight file",
            file=folder,
            expected=wanted,
            remedy="Download the weights into it, or give `--load-format dummy` to run without any.",
        )


def _check_no_other_copy(folder: Path) -> None:
    """Under `auto`, vLLM reads Mistral's own files where a folder has both; their names are not those of a transformers model."""
    copy = next(iter(sorted(folder.glob("consolidated*.safetensors"))), None)
    if copy is not None:
        raise CheckpointError(
            "a folder holds weights in Mistral's own format, which the load format `auto` takes first",
            file=copy,
            remedy="Give `--load-format safetensors` to read those of transformers instead.",
        )
