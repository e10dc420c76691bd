"""Root-mean-square norms.

In: an `RMSNormSpec`. Out: vLLM's `RMSNorm`, or its `GemmaRMSNorm` where the weight is an offset from one. A norm over an axis that is split
over tensor-parallel ranks is a layer of our own: vLLM has none. So is one that an eager engine runs on a CPU, where vLLM's is many
operations.
"""

from __future__ import annotations

from torch import nn

from vllm_layers_bridge.errors import NotBuildable
from vllm_layers_bridge.layers.kernel_norm import build_kernel_rms_norm
from vllm_layers_bridge.layers.parallel_norm import build_parallel_rms_norm
from vllm_layers_bridge.specs import RMSNormSpec


def build_rms_norm(spec: RMSNormSpec) -> nn.Module:
    """A norm over the last axis of `hidden_size` entries, or one rank's run of them; NotBuildable for an offset other than 0 or 1."""
    if spec.pieces > 1:
        return build_parallel_rms_norm(spec)
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    if spec.offset not in (0.0, 1.0) or (spec.offset and not spec.has_weight):
        raise NotBuildable(f"vLLM has no RMS norm with weight offset {spec.offset}.")
    in_one_kernel = build_kernel_rms_norm(spec)
    if in_one_kernel is not None:
        return in_one_kernel
    layer: nn.Module
    if spec.offset == 0.0:
        layer = RMSNorm(spec.hidden_size, eps=spec.eps, has_weight=spec.has_weight)
    else:
        layer = GemmaRMSNorm(spec.hidden_size, eps=spec.eps)
    return layer
