"""Broken checkpoints, made from a good one, each with what an error about it must say.

bad = BAD_INPUTS["missing-shard"](good, tmp_path / "bad")
answer = serve(ServeRequest(bad.folder, prompts))
assert not answer.ok
assert bad.unsaid(answer.error_text()) == []
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tf_tools.checkpoints import INDEX

__all__ = ["BAD_INPUTS", "BadInput"]

WHOLE = "model.safetensors"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@dataclass(frozen=True, slots=True)
class BadInput:
    """A broken checkpoint.

    Attributes:
        folder: where it lies.
        fault: what is wrong, in a few words.
        must_say: groups of spellings; an error must contain at least one of each group.
    """

    folder: Path
    fault: str
    must_say: tuple[tuple[str, ...], ...]

    def unsaid(self, text: str) -> list[str]:
        """The first spelling of each group of which the text holds none; empty when the error says all it must."""
        return [group[0] for group in self.must_say if not any(spelling in text for spelling in group)]


def _missing_shard(good: Path, folder: Path) -> BadInput:
    _sharded(good, folder)
    (folder / SECOND).unlink()
    return BadInput(folder, "the index names a file that is absent", ((SECOND,),))


def _truncated_shard(good: Path, folder: Path) -> BadInput:
    _sharded(good, folder)
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(data[: len(data) * 6 // 10])
    return BadInput(folder, "a weight file is cut short", ((SECOND,),))


def _wrong_shape(good: Path, folder: Path) -> BadInput:
    name, tensor = _a_matrix(good)
    wrong = torch.cat((tensor, tensor[:1]))
    _rewritten(good, folder, lambda tensors: {**tensors, name: wrong})
    shapes = (_spellings(tensor.shape), _spellings(wrong.shape))
    return BadInput(folder, "a weight has another shape than the config says", ((name,), *shapes))


def _missing_tensor(good: Path, folder: Path) -> BadInput:
    name, _ = _a_matrix(good)
    _rewritten(good, folder, lambda tensors: {k: v for k, v in tensors.items() if k != name})
    return BadInput(folder, "a weight that the model needs is absent", ((name,),))


def _extra_tensor(good: Path, folder: Path) -> BadInput:
    name, tensor = _a_matrix(good)
    extra = name.replace(".weight", ".mystery")
    _rewritten(good, folder, lambda tensors: {**tensors, extra: tensor})
    return BadInput(folder, "a weight that the model has no place for", ((extra,),))


def _index_lies(good: Path, folder: Path) -> BadInput:
    _sharded(good, folder)
    tensors = load_file(folder / SECOND)
    name = next(iter(tensors))
    save_file({k: v for k, v in tensors.items() if k != name}, folder / SECOND, metadata={"format": "pt"})
    return BadInput(folder, "the index places a weight in a file that lacks it", ((name,),))


def _no_config(good: Path, folder: Path) -> BadInput:
    shutil.copytree(good, folder)
    (folder / "config.json").unlink()
    return BadInput(folder, "no config.json", (("config.json",),))


def _not_json(good: Path, folder: Path) -> BadInput:
    shutil.copytree(good, folder)
    (folder / "config.json").write_text("{ this is not JSON")
    return BadInput(folder, "config.json is not JSON", (("config.json",),))


def _unknown_architecture(good: Path, folder: Path) -> BadInput:
    return _configured(good, folder, "an architecture that nothing implements", architectures=["NoSuchForCausalLM"])


def _unknown_model_type(good: Path, folder: Path) -> BadInput:
    return _configured(good, folder, "a model type that transformers does not know", model_type="no_such_type")


def _no_weights(good: Path, folder: Path) -> BadInput:
    _copied_without_weights(good, folder)
    return BadInput(folder, "no weight file at all", (("safetensors",), (str(folder),)))


def _empty_file(good: Path, folder: Path) -> BadInput:
    _copied_without_weights(good, folder)
    (folder / WHOLE).write_bytes(b"")
    return BadInput(folder, "a weight file of zero bytes", ((WHOLE,),))


def _no_tensors(good: Path, folder: Path) -> BadInput:
    name, _ = _a_matrix(good)
    _rewritten(good, folder, lambda _: {})
    return BadInput(folder, "a well-formed weight file that holds no tensor", ((name, WHOLE),))


BAD_INPUTS: Mapping[str, Callable[[Path, Path], BadInput]] = MappingProxyType(
    {
        "missing-shard": _missing_shard,
        "truncated-shard": _truncated_shard,
        "wrong-shape": _wrong_shape,
        "missing-tensor": _missing_tensor,
        "extra-tensor": _extra_tensor,
        "index-lies": _index_lies,
        "no-config": _no_config,
        "not-json": _not_json,
        "unknown-architecture": _unknown_architecture,
        "unknown-model-type": _unknown_model_type,
        "no-weights": _no_weights,
        "empty-file": _empty_file,
        "no-tensors": _no_tensors,
    }
)
"""Makers by name: `maker(good folder, new folder)`. The good folder is only read; the new one must not exist."""


def _tensors(good: Path) -> dict[str, Tensor]:
    return {k: v for path in sorted(good.glob("*.safetensors")) for k, v in load_file(path).items()}


def _a_matrix(good: Path) -> tuple[str, Tensor]:
    """The first matrix of a layer, by name: any one will do, but always the same."""
    matrices = {k: v for k, v in _tensors(good).items() if v.ndim == 2 and "layers.0." in k and k.endswith(".weight")}
    return min(matrices.items(), key=lambda item: item[0])


def _spellings(shape: torch.Size) -> tuple[str, ...]:
    sizes = ", ".join(map(str, shape))
    return f"[{sizes}]", f"({sizes})", "x".join(map(str, shape))


def _copied_without_weights(good: Path, folder: Path) -> None:
    shutil.copytree(good, folder, ignore=shutil.ignore_patterns("*.safetensors", INDEX))


def _rewritten(good: Path, folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    _copied_without_weights(good, folder)
    save_file(change(_tensors(good)), folder / WHOLE, metadata={"format": "pt"})


def _sharded(good: Path, folder: Path) -> None:
    _copied_without_weights(good, folder)
    tensors = _tensors(good)
    names = sorted(tensors)
    halves = {FIRST: names[: len(names) // 2], SECOND: names[len(names) // 2 :]}
    for file, held in halves.items():
        save_file({n: tensors[n] for n in held}, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.numel() * t.element_size() for t in tensors.values())},
        "weight_map": {name: file for file, held in halves.items() for name in held},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def _configured(good: Path, folder: Path, fault: str, **values: object) -> BadInput:
    shutil.copytree(good, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}, indent=2))
    found = next(iter(values.values()))
    return BadInput(folder, fault, ((found[0] if isinstance(found, list) else str(found),),))
