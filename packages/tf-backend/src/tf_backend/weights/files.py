"""What a checkpoint folder holds, read from the headers of its safetensors files alone.

In: a folder. Out: where each tensor lies and its shape; a `CheckpointError` that names the file when one is absent, cut short or no
safetensors file. Nothing but headers is read, so that a broken checkpoint is told before the engine spends minutes on it.
"""

from __future__ import annotations

import json
import math
import operator
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tf_backend.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000
_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on disk."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int | None:
        """Bytes that its shape and type take; None for a type that is not known here."""
        width = _BYTES.get(self.dtype)
        return None if width is None else width * math.prod(self.shape)

    def on_meta(self) -> torch.Tensor:
        """A tensor without memory; of torch's default type where the stored one is not known here."""
        return torch.empty(self.shape, dtype=_TYPES.get(self.dtype), device="meta")


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the safetensors checkpoint in `folder`, by name; empty when it holds no safetensors at all.

    Raises:
        CheckpointError: a file that the index names is absent, a file is cut short or malformed, or the index is.
    """
    index = folder / INDEX
    weight_map = _weight_map(index) if index.is_file() else None
    files = _whole_files(folder) if weight_map is None else _shards(folder, weight_map)
    found: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in _header(file):
            known = found.setdefault(tensor.name, tensor)
            if known is not tensor:
                raise CheckpointError(
                    f"a tensor lies in two files, {known.file.name} and {file.name}", tensor=tensor.name, file=file
                )
    if files and not found:
        raise CheckpointError("a weight file holds no tensor", file=files[0])
    for name, shard in (weight_map or {}).items():
        if name not in found or found[name].file.name != shard:
            raise CheckpointError(
                f"{INDEX} places a tensor in a shard that does not hold it", tensor=name, file=folder / shard
            )
    return found


def _whole_files(folder: Path) -> list[Path]:
    """The weight files of a folder without an index; Mistral's own `consolidated` copy is another format."""
    return sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        shards = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError("the index of the shards cannot be read", file=index, found=str(error)) from error
    strange = sorted(str(name) for name in shards if not isinstance(name, str) or Path(name).name != name)
    if strange:
        raise CheckpointError(
            "the index of the shards names something else than a file beside it", file=index, found=strange[0]
        )
    return weight_map


def _shards(folder: Path, weight_map: dict[str, str]) -> list[Path]:
    names = sorted(set(weight_map.values()))
    for name in names:
        if not (folder / name).is_file():
            tensors = sum(1 for file in weight_map.values() if file == name)
            raise CheckpointError(
                f"a shard is missing: {INDEX} names it for {tensors} tensors and the folder does not have it",
                file=folder / name,
            )
    return [folder / name for name in names]


def _header(file: Path) -> list[StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if len(start) < 8:
            raise CheckpointError(
                "a file is cut short", file=file, found=f"{size} bytes", expected="a safetensors header"
            )
        (length,) = struct.unpack("<Q", start)
        if length > _MAX_HEADER or 8 + length > size:
            raise CheckpointError(
                "a file is cut short or is no safetensors file",
                file=file,
                found=f"{size} bytes",
                expected=f"a header of {length} bytes",
            )
        raw = stream.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        tensors, end = [], 0
        for name, entry in sorted(entries, key=lambda item: item[1]["data_offsets"]):
            tensor = StoredTensor(name, file, tuple(map(operator.index, entry["shape"])), entry["dtype"])
            first, last = map(operator.index, entry["data_offsets"])
            if first != end or last < first:
                raise ValueError(f"the bytes of `{name}` are {first} to {last}, expected to begin at {end}")
            if tensor.size is not None and last - first != tensor.size:
                found = f"`{name}` of {tensor.dtype} {list(tensor.shape)} has {last - first} bytes"
                raise ValueError(f"{found}, expected {tensor.size}")
            end = last
            tensors.append(tensor)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            "a file is no safetensors file", file=file, found=f"a header that does not parse: {error}"
        ) from error
    if 8 + length + end != size:
        raise CheckpointError(
            "a file is cut short", file=file, found=f"{size} bytes", expected=f"{8 + length + end} bytes"
        )
    return tensors
