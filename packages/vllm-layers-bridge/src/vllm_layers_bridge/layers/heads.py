"""Attention heads on one tensor-parallel rank, as vLLM's layers split them.

In: heads of a model, ranks. Out: heads of a rank. Key and value heads are split while there are enough, and repeated where ranks
outnumber them.
"""

from __future__ import annotations

from vllm_layers_bridge.errors import NotBuildable


def heads_per_rank(num_heads: int, num_kv_heads: int, tensor_parallel: int) -> tuple[int, int]:
    """(query heads, key and value heads) on each rank; NotBuildable where they cannot be dealt out evenly."""
    if num_heads % tensor_parallel:
        raise NotBuildable(
            f"{num_heads} heads cannot be split over {tensor_parallel} ranks; use a divisor of {num_heads}."
        )
    if num_kv_heads % tensor_parallel and tensor_parallel % num_kv_heads:
        raise NotBuildable(
            f"{num_kv_heads} key-value heads can neither be split over {tensor_parallel} ranks nor repeated evenly on them; "
            f"use a divisor or a multiple of {num_kv_heads}."
        )
    return num_heads // tensor_parallel, max(1, num_kv_heads // tensor_parallel)
