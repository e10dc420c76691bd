"""What a checkpoint folder holds, read from the headers of its safetensors files alone.

In: a folder. Out: where each tensor lies and its shape; a `CheckpointError` that names the file when one is absent, cut short or no
safetensors file. Nothing but headers is read, so that a broken checkpoint is told before the engine spends minutes on it.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tf_backend.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on disk."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the safetensors checkpoint in `folder`, by name; empty when it holds no safetensors at all.

    Raises:
        CheckpointError: a file that the index names is absent, a file is cut short or malformed, or the index is.
    """
    found: dict[str, StoredTensor] = {}
    for file in _files(folder):
        for tensor in _header(file):
            found[tensor.name] = tensor
    return found


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        return sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError("the index of the shards cannot be read", file=index, found=str(error)) from error
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
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        tensors = [StoredTensor(name, file, tuple(entry["shape"]), entry["dtype"]) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            "a file is no safetensors file", file=file, found=f"a header that does not parse: {error}"
        ) from error
    if 8 + length + end != size:
        raise CheckpointError(
            "a file is cut short", file=file, found=f"{size} bytes", expected=f"{8 + length + end} bytes"
        )
    return tensors
