"""Tokens that several tensor-parallel ranks hold are sent to experts once: each rank sends a part of them (sequence parallel).

In: a runner and the tokens of one data-parallel rank, which its tensor-parallel ranks all have. Out: what the runner gives for all of them,
on each of these ranks. One operation takes the part, since its length follows from that of a row in a way that compilers stumble over.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def in_parts(runner: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, scores: Tensor) -> Tensor:
    """`runner` of hidden states and scores [tokens, ...], each rank its part.

    The last part is filled up with zeros: expert 0 with weight 0 where experts are told, else logits that are alike.
    """
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
        tensor_model_parallel_all_gather,
    )

    ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    part = torch.ops.moe_runner.part_of_tokens
    gathered: Tensor = tensor_model_parallel_all_gather(runner(part(hidden, ranks, rank), part(scores, ranks, rank)), 0)
    return gathered[: hidden.shape[0]]


@torch.library.custom_op("moe_runner::part_of_tokens", mutates_args=())
def _part_of_tokens(rows: Tensor, ranks: int, rank: int) -> Tensor:
    length = -(-rows.shape[0] // ranks)
    mine = rows[rank * length : (rank + 1) * length]
    return F.pad(mine, (0, 0, 0, length - mine.shape[0])) if mine.shape[0] < length else mine.clone()


@_part_of_tokens.register_fake
def _(rows: Tensor, ranks: int, rank: int) -> Tensor:
    return rows.new_empty((-(-rows.shape[0] // ranks), rows.shape[1]))
