"""A root-mean-square norm over an axis that is split over tensor-parallel ranks, such as a query norm over all heads.

In: an `RMSNormSpec` with several pieces. Out: a module over one rank's run of the axis. The mean of squares is taken over ranks, one
number for each token; the rest is local. Where ranks outnumber the runs, each run is on equally many ranks, so that the mean over ranks is
still the mean over the axis.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from vllm_layers_bridge.errors import NotBuildable
from vllm_layers_bridge.layers.norm_in_torch import rms_norm_in_torch
from vllm_layers_bridge.layers.shards import shard_parameter
from vllm_layers_bridge.specs import RMSNormSpec


class ParallelRMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * (offset + weight)``, the mean over the last axis of all ranks.

    Computed in float32 and returned in the type of the input; the weight is multiplied in before the cast or after it, as `scaled_in` of
    the spec says.

    Args:
        ranks: over which the axis is split.
        reduce: sums a tensor over them.
    """

    def __init__(self, spec: RMSNormSpec, ranks: int, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.spec = spec
        self.reduce = reduce
        self.ranks = ranks
        self.weight = (
            shard_parameter((spec.hidden_size,), torch.get_default_dtype(), 0, spec.pieces) if spec.has_weight else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., local features] to the same."""
        return rms_norm_in_torch(x, self.weight, self.spec, lambda mean: self.reduce(mean) / self.ranks)


def build_parallel_rms_norm(spec: RMSNormSpec) -> nn.Module:
    """The norm for this rank.

    Raises:
        NotBuildable: the runs are not equal, not the same number on each rank, or the weight is multiplied in in another way.
    """
    from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce

    ranks = get_tensor_model_parallel_world_size()
    if ranks % spec.pieces:
        raise NotBuildable(f"{spec.pieces} runs of a norm cannot be dealt out evenly to {ranks} ranks.")
    if spec.scaled_in is None:
        raise NotBuildable("the norm rounds its result before a weight of more digits is multiplied in.")
    return ParallelRMSNorm(spec, ranks, tensor_model_parallel_all_reduce)
