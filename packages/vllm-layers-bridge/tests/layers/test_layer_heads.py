"""Heads and split widths on one rank."""

from __future__ import annotations

import pytest
from vllm_layers_bridge.errors import NotBuildable
from vllm_layers_bridge.layers.heads import heads_per_rank
from vllm_layers_bridge.layers.linear import qkv_split_sizes
from vllm_layers_bridge.specs import QKVLinearSpec, Source


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "expected"),
    [(8, 8, 1, (8, 8)), (8, 2, 1, (8, 2)), (8, 2, 2, (4, 1)), (8, 2, 4, (2, 1)), (8, 1, 8, (1, 1)), (6, 3, 3, (2, 1))],
)
def test_heads_are_split_and_key_value_heads_repeated(
    heads: int, kv_heads: int, ranks: int, expected: tuple[int, int]
) -> None:
    assert heads_per_rank(heads, kv_heads, ranks) == expected


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "reason"),
    [(6, 2, 4, "6 heads cannot be split over 4 ranks"), (12, 3, 4, "3 key-value heads can neither be split over 4")],
)
def test_heads_that_cannot_be_dealt_out_are_refused(heads: int, kv_heads: int, ranks: int, reason: str) -> None:
    with pytest.raises(NotBuildable, match=reason):
        heads_per_rank(heads, kv_heads, ranks)


def test_split_widths_are_those_of_one_rank() -> None:
    sources = (Source("q", "q", 64), Source("k", "k", 16), Source("v", "v", 10))
    spec = QKVLinearSpec("qkv", sources, 4, False, 8, 5, num_heads=8, num_kv_heads=2, sizes_attribute="sizes")
    assert [qkv_split_sizes(spec, ranks) for ranks in (1, 2, 4)] == [(64, 16, 10), (32, 8, 5), (16, 8, 5)]
    with pytest.raises(NotBuildable):
        qkv_split_sizes(spec, 3)
