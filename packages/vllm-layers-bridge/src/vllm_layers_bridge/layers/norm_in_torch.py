"""The arithmetic of a root-mean-square norm, in operations of torch.

In: values, a weight, what the model's own norm does. Out: what that norm returns, digit for digit in half precision too: in float32, the
weight multiplied in before the cast or after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_layers_bridge.specs import RMSNormSpec


def rms_norm_in_torch(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    spec: RMSNormSpec,
    over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """[..., n] to the same.

    Args:
        over_ranks: the mean over tensor-parallel ranks of their means, where the axis is split over them.
    """
    wide = x.to(torch.float32)
    mean = wide.pow(2).mean(-1, keepdim=True)
    normed = wide * torch.rsqrt((mean if over_ranks is None else over_ranks(mean)) + spec.eps)
    if weight is None:
        return normed.to(x.dtype)
    if spec.scaled_in == "wide":
        scale = weight.to(torch.float32)
        return (normed * (scale + spec.offset if spec.offset else scale)).to(x.dtype)
    return normed.to(x.dtype) * (weight + spec.offset if spec.offset else weight)
