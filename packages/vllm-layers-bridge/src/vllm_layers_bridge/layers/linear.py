"""Linears: replicated, split by columns or rows, merged, and query-key-value.

In: a linear spec. Out: a vLLM linear whose call returns the tensor alone, so that it stands where an `nn.Linear` stood.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from vllm_layers_bridge.layers.heads import heads_per_rank
from vllm_layers_bridge.specs import LinearSpec, MergedLinearSpec, QKVLinearSpec


def build_linear(spec: LinearSpec, prefix: str, quant_config: Any) -> nn.Module:
    """One projection; a column split stays split and a row split is reduced, as the placement wants, unless another layer does that.

    Where there are fewer runs of outputs than ranks, the layer is built as if it gave each of them `copies` times, and is loaded so.
    """
    from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear

    if spec.style == "row":
        row: nn.Module = RowParallelLinear(
            spec.in_features,
            spec.out_features * spec.copies,
            bias=spec.bias,
            quant_config=quant_config,
            prefix=prefix,
            return_bias=False,
            reduce_results=spec.reduces,
        )
        return row
    kinds = {"replicated": ReplicatedLinear, "column": ColumnParallelLinear}
    layer: nn.Module = kinds[spec.style](
        spec.in_features,
        spec.out_features * spec.copies,
        bias=spec.bias,
        quant_config=quant_config,
        prefix=prefix,
        return_bias=False,
    )
    return layer


def build_merged_linear(spec: MergedLinearSpec, prefix: str, quant_config: Any) -> nn.Module:
    """Several projections of one input in one weight, each sharded for itself."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    layer: nn.Module = MergedColumnParallelLinear(
        spec.in_features,
        [source.size for source in spec.sources],
        bias=spec.bias,
        quant_config=quant_config,
        prefix=prefix,
        return_bias=False,
        disable_tp=spec.style == "replicated",
    )
    return layer


def build_qkv_linear(spec: QKVLinearSpec, prefix: str, quant_config: Any) -> nn.Module:
    """Query, key and value in one weight, sharded by heads; key and value heads are repeated when ranks outnumber them."""
    from vllm.model_executor.layers.linear import QKVParallelLinear

    layer: nn.Module = QKVParallelLinear(
        spec.in_features,
        spec.head_dim,
        spec.num_heads,
        spec.num_kv_heads,
        bias=spec.bias,
        quant_config=quant_config,
        prefix=prefix,
        return_bias=False,
        v_head_size=spec.value_head_dim,
    )
    return layer


def qkv_split_sizes(spec: QKVLinearSpec, tensor_parallel: int) -> tuple[int, int, int]:
    """Widths of query, key and value in the output on one of `tensor_parallel` ranks.

    Raises:
        NotBuildable: the heads cannot be dealt out evenly.
    """
    heads, kv_heads = heads_per_rank(spec.num_heads, spec.num_kv_heads, tensor_parallel)
    return heads * spec.head_dim, kv_heads * spec.head_dim, kv_heads * spec.value_head_dim
