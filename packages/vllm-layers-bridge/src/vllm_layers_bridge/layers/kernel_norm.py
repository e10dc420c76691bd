"""A root-mean-square norm in one kernel on a CPU.

In: an `RMSNormSpec`. Out: a module that calls the kernel which vLLM's build for the CPU has and its own layers do not call: they run ten
operations of torch. A compiler fuses these with what stands beside them, so that the layer is for eager engines alone.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from vllm_layers_bridge.layers.norm_in_torch import rms_norm_in_torch
from vllm_layers_bridge.specs import RMSNormSpec

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""By which the kernel may differ, as norm of the difference over norm of the result; the types that it is asked for."""


class KernelRMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * (offset + weight)``; what the kernel does not take, and under a compiler, in torch."""

    def __init__(self, spec: RMSNormSpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.ones(spec.hidden_size)) if spec.has_weight else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden size] to the same."""
        spec, weight = self.spec, self.weight
        if torch.compiler.is_compiling() or not self._takes(x, weight):
            return rms_norm_in_torch(x, weight, spec)
        if weight is None or not spec.offset:
            return rms_norm_kernel(x, weight, spec.eps)
        wide = rms_norm_kernel(x.to(torch.float32), weight.to(torch.float32) + spec.offset, spec.eps)
        return wide.to(x.dtype)

    def _takes(self, x: torch.Tensor, weight: torch.Tensor | None) -> bool:
        """Whether the kernel computes this: also in a type other than the engine's, in which a model may keep its norms."""
        if not x.is_cpu or (weight is not None and weight.dtype is not x.dtype):
            return False
        return is_computed(self.spec.hidden_size, torch.float32 if self.spec.offset else x.dtype)

    def extra_repr(self) -> str:
        return f"{self.spec.hidden_size}, eps={self.spec.eps}, offset={self.spec.offset}"


def build_kernel_rms_norm(spec: RMSNormSpec) -> KernelRMSNorm | None:
    """The norm; None where the platform is no CPU, vLLM's own kernels are off, or the kernel does not compute rows of this width."""
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.platforms import current_platform

    if spec.scaled_in is None or not current_platform.is_cpu() or not RMSNorm.enabled():
        return None
    computed_in = torch.float32 if spec.offset else torch.get_default_dtype()
    return KernelRMSNorm(spec) if is_computed(spec.hidden_size, computed_in) else None


def rms_norm_kernel(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """vLLM's kernel over the last axis; it reads rows that lie one after the other."""
    x = x.contiguous()
    out = torch.empty_like(x)  # of the strides of `x`, and quicker than `empty`
    torch.ops._C.rms_norm(out, x, weight, eps)
    return out


@functools.cache
def is_computed(width: int, dtype: torch.dtype) -> bool:
    """Whether the kernel is there, takes rows of `width` entries, and gives their norm: it is tried, on a few rows."""
    if dtype not in _TOLERANCE or not hasattr(torch.ops._C, "rms_norm"):
        return False
    count = torch.arange(3 * width, dtype=torch.float32, device="cpu").view(3, width)
    x, weight = torch.sin(count).to(dtype), torch.cos(count[0]).to(dtype)
    try:
        found = rms_norm_kernel(x, weight, 0.1).to(torch.float32)
    except (RuntimeError, NotImplementedError):
        return False
    norm = rms_norm_in_torch(x.to(torch.float32), weight.to(torch.float32), RMSNormSpec(width, 0.1, 0.0, True))
    return bool((found - norm).norm() <= _TOLERANCE[dtype] * norm.norm())
