"""A norm over an axis that is split over ranks: all ranks together give what the norm over the whole axis gives."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn
from vllm_layers_bridge.errors import NotBuildable
from vllm_layers_bridge.layers.parallel_norm import ParallelRMSNorm
from vllm_layers_bridge.layers.shards import run_of_rank, shard_parameter
from vllm_layers_bridge.specs import RMSNormSpec

WIDTH, EPS = 24, 0.1


def whole_norm(x: torch.Tensor, weight: torch.Tensor, offset: float, scaled_in: str) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    if scaled_in == "wide":
        return (normed * (weight.float() + offset)).to(x.dtype)
    return normed.to(x.dtype) * (weight + offset)


def over_ranks(
    x: torch.Tensor, weight: torch.Tensor, offset: float, scaled_in: Literal["wide", "input"], ranks: int, pieces: int
) -> list[torch.Tensor]:
    """What each rank gives; the sum over ranks is taken of what all of them hold."""
    runs = [x.chunk(pieces, -1)[run_of_rank(rank, ranks, pieces)] for rank in range(ranks)]
    total = torch.stack([run.float().pow(2).mean(-1, keepdim=True) for run in runs]).sum(0)
    spec = RMSNormSpec(WIDTH, EPS, offset, True, scaled_in=scaled_in, pieces=pieces)
    outputs = []
    for rank, run in enumerate(runs):
        norm = ParallelRMSNorm(spec, ranks, lambda mean: total)
        assert isinstance(norm.weight, nn.Parameter)
        norm.weight.data = weight.chunk(pieces)[run_of_rank(rank, ranks, pieces)]
        outputs.append(norm(run))
    return outputs


@pytest.mark.parametrize(("ranks", "pieces"), [(2, 2), (4, 2), (8, 4)])
@pytest.mark.parametrize("scaled_in", ["wide", "input"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_together_give_the_norm_of_the_whole(
    ranks: int, pieces: int, scaled_in: Literal["wide", "input"], offset: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(WIDTH, generator=generator).to(dtype)
    expected = whole_norm(x, weight, offset, scaled_in).chunk(pieces, -1)
    for rank, found in enumerate(over_ranks(x, weight, offset, scaled_in, ranks, pieces)):
        assert found.dtype is dtype
        exact = {"rtol": 0.0, "atol": 2e-6} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
        torch.testing.assert_close(found, expected[run_of_rank(rank, ranks, pieces)], **exact)


def test_a_mean_of_one_rank_alone_would_be_seen() -> None:
    x, weight = torch.arange(float(WIDTH)).view(1, WIDTH), torch.ones(WIDTH)
    spec = RMSNormSpec(WIDTH, EPS, 0.0, True, scaled_in="wide", pieces=2)
    norm = ParallelRMSNorm(spec, 2, lambda mean: 2 * mean)
    norm.weight.data = weight[: WIDTH // 2]
    assert not torch.allclose(norm(x[:, : WIDTH // 2]), whole_norm(x, weight, 0.0, "wide")[:, : WIDTH // 2])


def test_runs_are_equal_or_refused() -> None:
    assert shard_parameter((6, 4), torch.float32, 0, 3).shape == (2, 4)
    with pytest.raises(NotBuildable, match="5 entries cannot be split into 2 equal runs"):
        shard_parameter((5,), torch.float32, 0, 2)
