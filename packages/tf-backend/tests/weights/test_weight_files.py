"""What the headers of a checkpoint say, and how a broken one is told."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tf_backend.errors import CheckpointError
from tf_backend.weights.files import INDEX, stored_tensors

A, B = torch.zeros(2, 3), torch.ones(4, dtype=torch.bfloat16)


def raw(file: Path, header: object, data: bytes = b"") -> Path:
    """Write a file with this header, whatever it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def entry(shape: list[int], first: int, last: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        stored_tensors(folder)
    return str(caught.value)


def test_names_shapes_types_and_files(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stored = stored_tensors(tmp_path)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()} == {
        "a": ((2, 3), "F32"),
        "b": ((4,), "BF16"),
    }
    assert {tensor.file for tensor in stored.values()} == {tmp_path / "model.safetensors"}


def test_shards_by_index_and_nothing_beside_them(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "one.safetensors")
    save_file({"b": B}, tmp_path / "two.safetensors")
    save_file({"adapter": A}, tmp_path / "adapter.safetensors")
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    assert {name: tensor.file.name for name, tensor in stored_tensors(tmp_path).items()} == {
        "a": "one.safetensors",
        "b": "two.safetensors",
    }


def test_consolidated_copies_are_left_alone(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    save_file({"tok_embeddings.weight": A}, tmp_path / "consolidated.safetensors")
    assert set(stored_tensors(tmp_path)) == {"a"}


def test_a_folder_without_safetensors_is_empty_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"other format")
    assert stored_tensors(tmp_path) == {}


def test_tensors_may_be_listed_in_any_order(tmp_path: Path) -> None:
    raw(tmp_path / "model.safetensors", {"b": entry([1], 4, 8), "a": entry([1], 0, 4)}, bytes(8))
    assert set(stored_tensors(tmp_path)) == {"a", "b"}


@pytest.mark.parametrize("kept", [0, 3, 8, 20, -1])
def test_a_file_cut_short_anywhere(tmp_path: Path, kept: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": A}, file)
    file.write_bytes(file.read_bytes()[:kept])
    said = refusal(tmp_path)
    assert "model.safetensors" in said
    assert "cut short" in said
    assert "bytes" in said


def test_bytes_after_the_last_tensor(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": A}, file)
    file.write_bytes(file.read_bytes() + b"\0")
    assert "model.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("length", [2**63, 2**40, 100_000_001, 10_000])
def test_a_header_longer_than_the_file_is_not_read(tmp_path: Path, length: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
    said = refusal(tmp_path)
    assert "no safetensors file" in said
    assert str(length) in said


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"\xff\xfe",
        b"[" * 100_000,
        [],
        "text",
        {"a": 1},
        {"a": {"shape": [1]}},
        {"a": {"shape": "x", "dtype": "F32", "data_offsets": [0, 4]}},
        {"a": {"shape": [1.5], "dtype": "F32", "data_offsets": [0, 4]}},
        {"a": {"shape": [1], "dtype": "F32", "data_offsets": [0]}},
        {"a": {"shape": [1], "dtype": "F32", "data_offsets": None}},
    ],
    ids=lambda header: repr(header)[:40],
)
def test_a_header_that_is_none(tmp_path: Path, header: object) -> None:
    raw(tmp_path / "model.safetensors", header, bytes(4))
    assert "model.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("entries", "word"),
    [
        ({"a": entry([2], 0, 4)}, "expected 8"),
        ({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, "`b`"),
        ({"a": entry([1], 4, 8)}, "begin"),
        ({"a": entry([1], 0, 8)}, "expected 4"),
        ({"a": entry([4], 4, 0)}, "`a`"),
    ],
    ids=["too few bytes", "overlap", "gap", "too many bytes", "backwards"],
)
def test_offsets_that_do_not_fit_the_shapes(tmp_path: Path, entries: dict[str, Any], word: str) -> None:
    raw(tmp_path / "model.safetensors", entries, bytes(8))
    said = refusal(tmp_path)
    assert word in said
    assert "model.safetensors" in said


def test_a_file_without_tensors(tmp_path: Path) -> None:
    raw(tmp_path / "model.safetensors", {"__metadata__": {"format": "pt"}})
    assert "holds no tensor" in refusal(tmp_path)
    assert "model.safetensors" in refusal(tmp_path)


def test_one_tensor_in_two_files(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "one.safetensors")
    save_file({"a": A}, tmp_path / "two.safetensors")
    said = refusal(tmp_path)
    assert "`a`" in said
    assert "one.safetensors and two.safetensors" in said


def test_a_shard_that_is_missing_is_named_with_its_tensors(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "one.safetensors")
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    said = refusal(tmp_path)
    assert "two.safetensors" in said
    assert "2 tensors" in said


def test_an_index_that_lies(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "one.safetensors")
    save_file({"b": A}, tmp_path / "two.safetensors")
    index(tmp_path, {"a": "two.safetensors", "b": "two.safetensors"})
    said = refusal(tmp_path)
    assert "`a`" in said
    assert "two.safetensors" in said


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": ["x"]}}', '"weight_map"']
)
def test_an_index_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    assert INDEX in refusal(tmp_path)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "sub/one.safetensors", "..", 3])
def test_an_index_that_leads_out_of_the_folder(tmp_path: Path, name: object) -> None:
    index(tmp_path, {"a": name})
    said = refusal(tmp_path)
    assert INDEX in said
    assert str(name) in said
