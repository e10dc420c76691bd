"""Shapes near a gated MLP that are none: the reason in words, and its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ast_rewrite import FunctionSource
from torch import nn
from vllm_layers_bridge.fusions import GatedMLP

HIDDEN, WIDTH = 8, 12
X = torch.empty(1, 3, HIDDEN, device="meta")


class _Base(nn.Module):
    bias = False

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, WIDTH, bias=self.bias)
        self.up = nn.Linear(HIDDEN, WIDTH, bias=self.bias)
        self.down = nn.Linear(WIDTH, HIDDEN, bias=self.bias)
        self.act = nn.SiLU()


class GLUMLP(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class MoreAround(_Base):
    def forward(self, x):
        x = x + 1
        y = 2 * (self.act(self.gate(x)) * self.up(x)) - self.up.in_features
        x = x * 3
        return self.down(y) + x


class GateUsedTwice(_Base):
    def forward(self, x):
        gate = self.gate(x)
        return self.down(self.act(gate) * self.up(x)) + gate.sum()


class GateCalledTwice(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x)) + self.gate(x + 1).sum()


class GateWeightRead(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x)) + self.gate.weight.sum()


class GateWidthRead(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x)) * self.gate.out_features


class DifferentInputs(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x + 1))


class InputReboundBetween(_Base):
    def forward(self, x):
        gate = self.gate(x)
        x = x * 2
        return self.down(self.act(gate) * self.up(x))


class InputWrittenBetween(_Base):
    def forward(self, x):
        gate = self.gate(x)
        x.add_(1.0)
        return self.down(self.act(gate) * self.up(x))


class DataWrittenBetween(_Base):
    def forward(self, x):
        up = self.up(x)
        x.data.mul_(2.0)
        return self.down(self.act(self.gate(x)) * up)


class GateClamped(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x).clamp(max=7.0)) * self.up(x))


class ActivatedGateClamped(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x)).clamp(max=7.0) * self.up(x))


class UpClamped(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x).clamp(-7.0, 7.0))


class UpPlusOne(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * (self.up(x) + 1))


class ActivationAfterProduct(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x) * self.up(x)))


class NoActivation(_Base):
    def forward(self, x):
        return self.down(self.gate(x) * self.up(x))


class UnknownActivation(_Base):
    def forward(self, x):
        return self.down(torch.sin(self.gate(x)) * self.up(x))


class OneLinearTwice(_Base):
    def forward(self, x):
        gate = self.gate(x)
        return self.down(self.act(gate) * gate + self.up(x))


class OneLinearInTwoCalls(_Base):
    def forward(self, x):
        return self.down(self.gate(x) * self.act(self.gate(x).to(x.dtype)))


NEAR = [
    (GateUsedTwice, "the output of `gate` is used outside of the product too, by `sum`"),
    (GateCalledTwice, "`gate` is called 2 times, so its weight cannot move into a merged layer"),
    (GateWeightRead, "the forward reads `gate.weight` beside calling `gate`"),
    (MoreAround, "the forward reads `up.in_features` beside calling `up`"),
    (GateWidthRead, "the forward reads `gate.out_features` beside calling `gate`"),
    (DifferentInputs, "`gate` and `up` read different inputs"),
    (InputReboundBetween, "`gate` and `up` read different inputs"),
    (InputWrittenBetween, "`add` writes in place to the input"),
    (DataWrittenBetween, "written"),
    (GateClamped, "`clamp` stands between `gate` and its activation"),
    (ActivatedGateClamped, "`clamp` stands between the activation and the product"),
    (UpClamped, "`clamp` stands between `up` and the product"),
    (UpPlusOne, "`add` stands between `up` and the product"),
    (ActivationAfterProduct, "the activation comes after the product of `gate` and `up`"),
    (NoActivation, "neither `gate` nor `up` is activated before the product"),
    (UnknownActivation, "`sin` is no activation that is known"),
    (OneLinearTwice, "both factors come from the one call of `gate`"),
    (OneLinearInTwoCalls, "both factors come from calls of `gate`"),
]


@pytest.mark.parametrize(("cls", "reason"), NEAR, ids=lambda value: getattr(value, "__name__", ""))
def test_near_miss_says_in_words_why_not_and_where(
    miss_of: Callable[..., Any], cls: type[nn.Module], reason: str
) -> None:
    miss = miss_of(GatedMLP(), cls(), X)
    assert reason in miss.reason
    first = FunctionSource.of(cls.forward).lineno
    assert first < int(miss.line.rpartition(":")[2]) <= first + 3, miss.line


@pytest.mark.parametrize("cls", [case[0] for case in NEAR if case[0] is not OneLinearTwice])
def test_a_module_with_the_parts_is_a_candidate(traced: Callable[..., Any], cls: type[nn.Module]) -> None:
    assert GatedMLP().is_candidate(traced(cls(), X))


class PlainMLP(_Base):
    def forward(self, x):
        return self.down(self.act(self.up(x)))


class GatedMixer(_Base):
    def forward(self, x):
        mixed = torch.softmax(self.up(x) @ self.gate(x).transpose(1, 2), -1) @ self.up(x)
        return self.down(torch.sigmoid(self.gate(x)) * mixed)


class ScaledMLP(_Base):
    def forward(self, x):
        return self.down(self.act(self.up(x)) * 2.0)


@pytest.mark.parametrize("cls", [PlainMLP, ScaledMLP, GatedMixer])
def test_a_module_without_the_parts_is_no_candidate(
    traced: Callable[..., Any], miss_of: Callable[..., Any], cls: type[nn.Module]
) -> None:
    assert not GatedMLP().is_candidate(traced(cls(), X))
    assert miss_of(GatedMLP(), cls(), X).reason


class WeightAsArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Parameter(torch.empty(WIDTH, HIDDEN)), nn.Parameter(torch.empty(WIDTH, HIDDEN))

    def forward(self, x):
        return F.silu(F.linear(x, self.gate)) * F.linear(x, self.up)


def test_products_with_stored_weights_are_not_taken_for_linears(miss_of: Callable[..., Any]) -> None:
    assert "expected" in miss_of(GatedMLP(), WeightAsArgument(), X).reason


def test_a_linear_with_a_hook_is_not_matched(miss_of: Callable[..., Any]) -> None:
    module = GLUMLP()
    module.gate.register_forward_pre_hook(lambda *_: None)
    assert miss_of(GatedMLP(), module, X).reason
