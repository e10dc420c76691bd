"""One rank's run of a parameter, and how it is loaded from the whole.

In: the shape of the whole, the axis that is split, the number of runs. Out: a parameter with a `weight_loader`, as vLLM's own have. Of R
ranks, rank r holds run ``r * pieces // R``: where there are fewer runs than ranks, neighbours hold the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from vllm_layers_bridge.errors import NotBuildable


def run_of_rank(rank: int, ranks: int, pieces: int) -> int:
    """Which of `pieces` runs a rank holds."""
    return rank * pieces // ranks


def shard_parameter(shape: Sequence[int], dtype: torch.dtype, axis: int, pieces: int) -> nn.Parameter:
    """Memory, on the current device, for one of `pieces` runs along `axis` of a parameter of `shape`.

    Raises:
        NotBuildable: the runs would not be equal.
    """
    local = list(shape)
    if local[axis] % pieces:
        raise NotBuildable(f"{local[axis]} entries cannot be split into {pieces} equal runs.")
    local[axis] //= pieces
    parameter = nn.Parameter(torch.empty(local, dtype=dtype), requires_grad=False)

    def load(target: torch.Tensor, loaded: torch.Tensor) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        run = run_of_rank(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size(), pieces)
        target.data.copy_(loaded.narrow(axis, run * local[axis], local[axis]))

    parameter.weight_loader = load  # type: ignore[attr-defined]
    return parameter
