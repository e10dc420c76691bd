"""Gate and up with more between them and their product than an activation: merged, equal at every size; and what stays apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ast_rewrite import Refused
from torch import nn
from torch.nn import functional as F
from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions import GateUp
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import MergedLinearSpec, Source

HIDDEN, WIDTH = 8, 12
X = torch.empty(1, 3, HIDDEN, device="meta")
LINE = "gate_output, up_output = self.gate_up_proj(x).chunk(2, dim=-1)"


class _Base(nn.Module):
    bias = False

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, WIDTH, bias=self.bias)
        self.up = nn.Linear(HIDDEN, WIDTH, bias=self.bias)
        self.down = nn.Linear(WIDTH, HIDDEN)
        self.act = nn.SiLU()
        self.limit = 0.3


class Clamped(_Base):
    def forward(self, x):
        gate = self.gate(x).clamp(max=self.limit)
        up = self.up(x).clamp(min=-self.limit, max=self.limit)
        return self.down(self.act(gate) * up)


class Scaled(_Base):
    bias = True

    def forward(self, x):
        y = self.up(x) * self.act(self.gate(x) * 0.7)
        return self.down(y) * 0.5


class Cast(_Base):
    def forward(self, x):
        gate = self.gate(x)
        up = self.up(x)
        return self.down((self.act(gate.double()) * up.double()).to(gate.dtype))


class OwnSigmoid(_Base):
    def forward(self, x):
        gate = self.gate(x).clamp(max=self.limit)
        return self.down((self.up(x) + 1.0) * (gate * torch.sigmoid(gate * 1.7)))


class InBranch(_Base):
    double = True

    def forward(self, x):
        gate = F.silu(self.gate(x) * 2)
        if self.double:
            gate = gate * self.up(x)
        return self.down(gate)


FUSES = [Clamped, Scaled, Cast, OwnSigmoid, InBranch]


@pytest.mark.parametrize("cls", FUSES)
def test_two_projections_become_one_and_compute_what_they_did(fuse: Callable[..., Any], cls: type[nn.Module]) -> None:
    module = cls().requires_grad_(False)
    fused = fuse(GateUp(), module, X)
    assert fused.text.count(LINE) == 1
    assert "self.gate(" not in fused.text
    assert "self.up(" not in fused.text
    (spec,) = fused.specs
    first = "up" if cls is Scaled else "gate"
    assert isinstance(spec, MergedLinearSpec)
    assert spec.sources == (Source(first, 0, WIDTH), Source("up" if first == "gate" else "gate", 1, WIDTH))
    inputs = [torch.randn(1, tokens, HIDDEN) for tokens in (1, 2, 5)]
    expected = [module(x) for x in inputs]
    applied = fused.apply_plain()
    for x, output in zip(inputs, expected, strict=True):
        torch.testing.assert_close(applied(x), output)


class Plain(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class OtherInputs(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x) * 2) * self.up(x + 1))


class CalledTwice(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x) * 2) * self.up(x)) + self.down(self.gate(x))


class WeightRead(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x) * 2) * self.up(x)) + self.gate.weight.sum()


class Written(_Base):
    def forward(self, x):
        gate = self.gate(x)
        gate.mul_(2)
        return self.down(self.act(gate) * self.up(x))


class InputWritten(_Base):
    def forward(self, x):
        gate = self.gate(x) * 2
        x.add_(1)
        return self.down(self.act(gate) * self.up(x))


class Narrow(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 1)

    def forward(self, x):
        return self.down(torch.sigmoid(self.gate(x) * 2) * self.up(x))


class Attends(_Base):
    def forward(self, x):
        heads = (self.up(x) * self.act(self.gate(x) * 2)).view(1, -1, 2, 6).transpose(1, 2)
        return self.down(attention_leaf(self, heads, heads, heads)[0].reshape(1, -1, 12))


class Three(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x) + self.up(x)) * self.up(x))


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Plain, "fused as one"),
        (Attends, "the forward attends"),
        *(
            (cls, "no product of two linears")
            for cls in (OtherInputs, CalledTwice, WeightRead, Written, InputWritten, Narrow, Three)
        ),
    ],
)
def test_what_cannot_share_a_weight(
    miss_of: Callable[..., Any], traced: Callable[..., Any], cls: type[nn.Module], reason: str
) -> None:
    assert reason in miss_of(GateUp(), cls(), X.clone()).reason
    assert not GateUp().is_candidate(traced(cls(), X.clone()))


class OnAnArgument(_Base):
    def forward(self, x, more=None):
        gate = F.silu(self.gate(x) * 2)
        if more is None:
            gate = gate * self.up(x)
        return self.down(gate)


class OtherReceiver(_Base):
    def forward(me, x):
        gate = me.gate(x).clamp(max=me.limit)
        return me.down(me.act(gate) * me.up(x))


def test_the_layer_is_reached_by_the_name_that_the_forward_has_for_its_module(fuse: Callable[..., Any]) -> None:
    assert "gate_output, up_output = me.gate_up_proj(x)" in fuse(GateUp(), OtherReceiver(), X).rewrite.text


def test_a_branch_of_an_argument_is_refused(fuse: Callable[..., Any]) -> None:
    with pytest.raises(Refused, match="do not lie in one block"):
        fuse(GateUp(), OnAnArgument(), X)


def test_an_instance_that_differs_is_not_fused(traced: Callable[..., Any]) -> None:
    match = GateUp().match(traced(Clamped(), X))
    module = Clamped()
    module.up = nn.Linear(HIDDEN, WIDTH, bias=True)
    with pytest.raises(NotFusable, match="bias"):
        GateUp().check(match, module, None)
