"""A count of the tokens in a row becomes the engine's positions, where it is computed with number by number and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions import RowPositions
from vllm_layers_bridge.seams.row import ROW, Row

X = torch.empty(1, 7, 8, device="meta")


class Tempered(nn.Module):
    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device) + 0
        scales = torch.log1p(torch.floor((positions.float() + 1.0) / 3)) * 0.5 + 1.0
        return x * scales.view((1, x.shape[1], 1)).expand((*x.shape[:-1], 1))


class Plain(nn.Module):
    def forward(self, x):
        return x + torch.arange(x.shape[1])[:, None].to(x.dtype) * 0.1


class Picking(nn.Module):
    def forward(self, x):
        return x[:, torch.arange(x.shape[1])]


class Comparing(nn.Module):
    def forward(self, x):
        at = torch.arange(x.shape[1])
        return x * ((at[:, None] - at[None, :]) > 0).float().sum(-1)[:, None]


class Summing(nn.Module):
    def forward(self, x):
        return x * torch.arange(x.shape[1]).float().mean()


class OverFeatures(nn.Module):
    def forward(self, x):
        return x * torch.arange(x.shape[-1])


class FromOne(nn.Module):
    def forward(self, x):
        return x * torch.arange(1, x.shape[1] + 1)[:, None]


@pytest.mark.parametrize("cls", [Tempered, Plain])
def test_numbers_follow_the_positions_of_the_row(cls: type[nn.Module], fuse: Callable[..., Any]) -> None:
    rewrite = fuse(RowPositions(), cls(), X).rewrite
    assert f'self.{ROW}.positions if hasattr(self, "{ROW}") else torch.arange(' in rewrite.text
    x = torch.randn(1, 7, 8)
    whole, module = cls()(x), cls()
    module.__class__ = type(cls.__name__, (cls,), {"forward": rewrite.function})
    assert torch.equal(module(x), whole)  # without a row it counts as before
    row = Row()
    setattr(module, ROW, row)
    order = torch.tensor([4, 5, 6, 0, 1, 2, 3])
    row.positions = order
    assert torch.equal(module(x[:, order]), whole[:, order])
    assert not torch.equal(cls()(x[:, order]), whole[:, order])


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Picking, "otherwise than number by number"),
        (Comparing, "otherwise than number by number"),
        (Summing, "otherwise than number by number"),
        (OverFeatures, "does not count the tokens"),
        (FromOne, "does not count the tokens"),
    ],
)
def test_what_is_no_position_stays(cls: type[nn.Module], reason: str, miss_of: Callable[..., Any]) -> None:
    assert reason in miss_of(RowPositions(), cls(), X).reason


def test_a_name_that_is_taken(fuse: Callable[..., Any]) -> None:
    module = Tempered()
    setattr(module, ROW, 1)
    with pytest.raises(NotFusable, match=ROW):
        fuse(RowPositions(), module, X)
