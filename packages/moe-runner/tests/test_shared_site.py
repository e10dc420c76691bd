"""Which sum of routed and shared experts the runner can make itself, and what keeps one in the block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fx_match import trace
from moe_runner import SharedSite, find_shared
from torch import Tensor, nn
from torch.nn import functional as F

H = 8


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(4, H, H))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return torch.empty_like(x)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 2 * H), nn.Linear(2 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).relu())
        return out


class Block(nn.Module):
    """Every token goes through `all_of_it` too."""

    def __init__(self) -> None:
        super().__init__()
        self.boss, self.work, self.all_of_it, self.taste = nn.Linear(H, 4), Experts(), Mlp(), nn.Linear(H, 1)
        self.wide, self.soft = nn.Linear(H, H), nn.Sigmoid()

    def routed(self, x: Tensor) -> Tensor:
        weights, ids = self.boss(x).topk(2, dim=-1)
        out: Tensor = self.work(x, ids, weights)
        return out


class Added(Block):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x.view(-1, H)).view(x.shape) + self.all_of_it(x)


class AddedBefore(Block):
    def forward(self, x: Tensor) -> Any:
        beside = self.all_of_it(x.reshape(-1, H)).view_as(x)
        return beside + self.routed(x.view(-1, H)).view_as(x)


class InPlace(Block):
    def forward(self, x: Tensor) -> Any:
        out = self.routed(x.view(-1, H))
        out += self.all_of_it(x.view(-1, H))
        return out.view_as(x)


class Tasted(Block):
    def forward(self, x: Tensor) -> Any:
        flat = x.view(-1, H)
        return (self.routed(flat) + self.all_of_it(flat) * F.sigmoid(self.taste(flat))).view_as(x)


class TastedByAModule(Block):
    def forward(self, x: Tensor) -> Any:
        flat = x.view(-1, H)
        return (self.soft(self.taste(x)).view(-1, 1) * self.all_of_it(flat) + self.routed(flat)).view_as(x)


@pytest.mark.parametrize(
    ("block", "gate", "routed", "ndim"),
    [
        (Added, None, 0, 3),
        (AddedBefore, None, 1, 2),
        (InPlace, None, 0, 2),
        (Tasted, "taste", 0, 2),
        (TastedByAModule, "taste", 1, 2),
    ],
)
def test_the_sum_is_found(block: type[Block], gate: str | None, routed: int, ndim: int) -> None:
    found = site(block)
    assert isinstance(found, SharedSite), found
    assert str(found.shared.target) == "all_of_it"
    assert (None if found.gate is None else str(found.gate.target)) == gate
    assert (found.routed, found.ndim) == (routed, ndim)


class Subtracted(Block):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x) - self.all_of_it(x)


class Scaled(Block):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x) * 2.5 + self.all_of_it(x)


class ScaledShared(Block):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x) + self.all_of_it(x) * 2.5


class WithAlpha(Block):
    def forward(self, x: Tensor) -> Any:
        return torch.add(self.routed(x), self.all_of_it(x), alpha=2)


class UsedTwice(Block):
    def forward(self, x: Tensor) -> Any:
        beside = self.all_of_it(x)
        return self.routed(x) + beside, beside


class AddedTwice(Block):
    def forward(self, x: Tensor) -> Any:
        beside = self.all_of_it(x)
        return self.routed(x) + beside + beside


class RoutedUsedTwice(Block):
    def forward(self, x: Tensor) -> Any:
        routed = self.routed(x)
        return routed + self.all_of_it(x), routed


class OtherInput(Block):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x) + self.all_of_it(x * 2)


class OtherTaste(Block):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x) + self.taste(x * 2).sigmoid() * self.all_of_it(x)


class InAnotherOrder(Block):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x[0]) + self.all_of_it(x.flip(1))[0]


class Transposed(Block):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x.view(-1, H)) + self.all_of_it(x.transpose(0, 1).reshape(-1, H))


class WrittenTo(Block):
    def forward(self, x: Tensor) -> Any:
        x = x.clone()
        routed = self.routed(x)
        x += 1
        return routed + self.all_of_it(x)


class ChainedWrites(Block):
    def forward(self, x: Tensor) -> Any:
        x = x.clone()
        view = x.view(-1, H)
        routed = self.routed(x.view(-1, H))
        view.mul_(2)
        return routed + self.all_of_it(x.view(-1, H))


class Rounded(Block):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x).double() + self.all_of_it(x).double()


class Broadcast(Block):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x) + self.all_of_it(x)[:, :1]


class Gated(Block):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x) + self.wide(x).sigmoid() * self.all_of_it(x)


class Tanh(Block):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x) + self.taste(x).tanh() * self.all_of_it(x)


class NoNetwork(Block):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x) + self.wide(x)


class Residual(Block):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x) + x


class OneByOne(Block):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x.view(-1, 1, H)) + self.all_of_it(x.view(-1, 1, H))


class Doubled(Block):
    def forward(self, x: Tensor) -> Any:
        routed = self.routed(x)
        return routed + routed


class Twice(Block):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x) + self.routed(x) + self.all_of_it(x)


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (Subtracted, "`sub` (sub) is computed of what its experts give"),
        (Scaled, "`mul` (mul) is computed of what its experts give"),
        (ScaledShared, "what is added to its experts is `mul` (mul)"),
        (WithAlpha, "(add_scaled) is computed of what its experts give"),
        (UsedTwice, "`all_of_it` is used for something else than the sum too"),
        (AddedTwice, "`all_of_it` is used for something else than the sum too"),
        (RoutedUsedTwice, "what its experts give is used for something else before"),
        (OtherInput, "`all_of_it` is given something else than its experts"),
        (OtherTaste, "`taste` is given something else than its experts"),
        (InAnotherOrder, "no child with weights gives that"),
        (Transposed, "`all_of_it` is given something else than its experts"),
        (WrittenTo, "`all_of_it` is given something else than its experts"),
        (ChainedWrites, "which its experts are given, is written to"),
        (Rounded, "(cast) is computed of what its experts give"),
        (Broadcast, "is of another shape or type"),
        (Gated, "no sigmoid of a linear with one feature"),
        (Tanh, "no sigmoid of a linear with one feature"),
        (NoNetwork, "no child with weights gives that"),
        (Residual, "`x` is used for something else than the sum too"),
        (OneByOne, "expected [tokens, hidden] or [1, tokens, hidden]"),
        (Doubled, "(add) is computed of what its experts give"),
        (Twice, "its experts are not called once"),
    ],
)
def test_what_is_no_such_sum_stays(block: type[Block], why: str) -> None:
    found = site(block)
    assert isinstance(found, str), found
    assert why in found


def site(block: type[Block]) -> SharedSite | str:
    with torch.device("meta"):
        module, x = block(), torch.empty(1, 5, H)
    return find_shared(trace(module, (x,)), experts="work", hidden=0)
