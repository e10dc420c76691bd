"""A llama-shaped checkpoint of any size that costs no more than writing it: one block of small random numbers, repeated.

In: a folder and a size. Out: config.json and bfloat16 shards with their index, as `save_pretrained` names them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

GIB = 2**30
_SHARD = GIB
_HIDDEN, _INNER, _VOCABULARY, _HEADS, _KV_HEADS = 2048, 5632, 32_000, 32, 4


def make_large_checkpoint(folder: Path, gib: float, *, tied: bool = False) -> Path:
    """Write a checkpoint of at least `gib` GiB and return its folder, which must not exist.

    Args:
        tied: the head shares the embedding's weight, and no copy of it is stored.
    """
    folder.mkdir(parents=True)
    config = _config(gib, tied)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    shards = list(_shards(shapes))
    block = (torch.randn(2**20, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    data = block.view(torch.uint8).numpy().tobytes()
    index = {}
    for number, names in enumerate(shards, 1):
        file = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write(file, {name: shapes[name] for name in names}, data)
        index.update(dict.fromkeys(names, file.name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    return folder


def _config(gib: float, tied: bool) -> LlamaConfig:
    head_dim = _HIDDEN // _HEADS
    layer = 2 * (2 * _HIDDEN**2 + 2 * _HIDDEN * _KV_HEADS * head_dim + 3 * _HIDDEN * _INNER)
    ends = 2 * _HIDDEN * _VOCABULARY * (1 if tied else 2)
    return LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=_HIDDEN,
        intermediate_size=_INNER,
        num_hidden_layers=max(1, -int(-(gib * GIB - ends) // layer)),
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
    )


def _shards(shapes: dict[str, list[int]]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        size += _bytes(shape)
        names.append(name)
        if size >= _SHARD:
            yield names
            names, size = [], 0
    if names:
        yield names


def _bytes(shape: list[int]) -> int:
    return 2 * int(torch.Size(shape).numel())


def _write(file: Path, shapes: dict[str, list[int]], block: bytes) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes):
        first, end = end, end + _bytes(shapes[name])
        header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        while end > 0:
            end -= stream.write(block[: min(end, len(block))])
