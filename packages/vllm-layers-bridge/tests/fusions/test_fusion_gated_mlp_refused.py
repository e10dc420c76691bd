"""A gated MLP whose text does more than its graph shows, and instances that a match does not speak for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ast_rewrite import FunctionSource, Patch, Refused
from torch import nn
from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions import GatedMLP, ModuleFacts
from vllm_layers_bridge.specs import ActivationAndMulSpec

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


class ReversedGLUMLP(_Base):
    def forward(self, x):
        return self.down(self.up(x) * self.act(self.gate(x)))


class InPlaceProductGLUMLP(_Base):
    def forward(self, x):
        hidden = self.act(self.gate(x))
        hidden *= self.up(x)
        return self.down(hidden)


class InAComprehension(_Base):
    def forward(self, x):
        return torch.cat([self.down(self.act(self.gate(part)) * self.up(part)) for part in x.split(4, dim=1)], dim=1)


class InAConditional(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x)) if x.shape[1] > 2 else self.down(self.up(x) * 0)


# Source that the graph does not show


class HelperWithMore(_Base):
    def _both(self, x):
        x = x * 2
        return self.act(self.gate(x)) * self.up(x)

    def forward(self, x):
        return self.down(self._both(x))


class HelperActivation(_Base):
    def _gated(self, x):
        return self.act(self.gate(x))

    def forward(self, x):
        return self.down(self._gated(x) * self.up(x))


class AliasedGate(_Base):
    def forward(self, x):
        project = self.gate
        return self.down(self.act(project(x)) * self.up(x))


class GateAskedFor(_Base):
    def forward(self, x):
        y = self.act(self.gate(x)) * self.up(x)
        return self.down(y) if self.gate is not None else y


class GateOnTheOtherPath(_Base):
    def forward(self, x):
        if x.shape[1] > 100:
            return self.gate(x)
        return self.down(self.act(self.gate(x)) * self.up(x))


class ComputedInput(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(y := x + 1)) * self.up(y))


class BranchBetween(_Base):
    def forward(self, x):
        gate = self.gate(x)
        if x.shape[1] > 100:
            return gate
        return self.down(self.act(gate) * self.up(x))


REFUSED = [
    (HelperWithMore, "made in `_both`"),
    (HelperActivation, "made in `_gated`"),
    (AliasedGate, "`gate` is called as `project`"),
    (GateAskedFor, "uses `self.gate` beside calling it"),
    *([(InAComprehension, "made in `<listcomp>`")] if sys.version_info < (3, 12) else []),
    *([(InAComprehension, "made in `<listcomp>`")] if sys.version_info < (3, 12) else []),
    (InAConditional, "on a path that depends on the sample"),
    (GateOnTheOtherPath, "on a path that depends on the sample"),
    (ComputedInput, "input must be a name"),
    (BranchBetween, "can be left between"),
]


@pytest.mark.parametrize(("cls", "reason"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_text_that_does_more_than_the_graph_shows_is_refused(
    fuse: Callable[..., Any], cls: type[nn.Module], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        fuse(GatedMLP(), cls(), X)


def test_a_forward_of_another_function_is_not_rewritten(traced: Callable[..., Any]) -> None:
    seen = traced(GLUMLP(), X)
    fusion = GatedMLP()
    match = fusion.match(seen)
    with pytest.raises(Refused, match="not the one of its class"):
        fusion.rewrite(match, seen, Patch(FunctionSource.of(ReversedGLUMLP.forward)))


# Instances of the variant that are not the traced one


def _changed(change: Callable[[nn.Module], None], cls: type[nn.Module] = GLUMLP) -> nn.Module:
    module = cls()
    change(module)
    return module


class LoraLinear(nn.Linear):
    pass


def _half(module: nn.Module) -> None:
    module.up = module.up.to(torch.bfloat16)


OTHERS = [
    (lambda m: setattr(m, "up", m.gate), "not distinct layers"),
    (lambda m: setattr(m.up, "weight", m.gate.weight), "share a tensor"),
    (lambda m: setattr(m, "up", nn.Linear(HIDDEN, WIDTH)), "up has a bias and gate has none"),
    (lambda m: setattr(m, "up", nn.Linear(HIDDEN, 2 * WIDTH, bias=False)), "gives 12 features and `up` 24"),
    (lambda m: setattr(m, "up", nn.Linear(HIDDEN + 1, WIDTH, bias=False)), "takes 8 features and up takes 9"),
    (lambda m: setattr(m, "up", LoraLinear(HIDDEN, WIDTH, bias=False)), "`up` is a LoraLinear"),
    (lambda m: setattr(m, "up", nn.Identity()), "`up` is a Identity"),
    (lambda m: delattr(m, "up"), "no child `up`"),
    (lambda m: m.up.register_forward_hook(lambda *_: None), "nn.Linear with hooks"),
    (lambda m: m.up.register_forward_pre_hook(lambda *_: None), "nn.Linear with hooks"),
    (_half, "gate holds torch.float32 and up holds torch.bfloat16"),
    (lambda m: setattr(m, "act", nn.ReLU()), "its activation is relu"),
    (lambda m: setattr(m, "act", nn.PReLU()), "its activation is none that is known"),
    (lambda m: setattr(m, "gate_up_proj", None), "attribute `gate_up_proj` already"),
    (lambda m: setattr(m, "act_and_mul", None), "attribute `act_and_mul` already"),
]


@pytest.mark.parametrize(("change", "reason"), OTHERS, ids=[reason for _, reason in OTHERS])
def test_an_instance_that_differs_is_not_fused(
    traced: Callable[..., Any], change: Callable[[nn.Module], None], reason: str
) -> None:
    match = GatedMLP().match(traced(GLUMLP(), X))
    with pytest.raises(NotFusable, match=reason):
        GatedMLP().check(match, _changed(change), ModuleFacts("other"))


def test_the_activation_is_the_instances_own(traced: Callable[..., Any]) -> None:
    fusion = GatedMLP()
    match = fusion.match(traced(GLUMLP(), X))
    other = _changed(lambda module: setattr(module, "act", nn.GELU(approximate="tanh")))
    fusion.check(match, other, ModuleFacts("other"))
    assert fusion.layers(match, other, ModuleFacts("other"))[1] == ActivationAndMulSpec("act_and_mul", "gelu_tanh")


def test_any_activation_will_do_where_it_is_not_fused(traced: Callable[..., Any]) -> None:
    fusion = GatedMLP()
    match = fusion.match(traced(InPlaceProductGLUMLP(), X))
    other = _changed(lambda module: setattr(module, "act", nn.ReLU()), InPlaceProductGLUMLP)
    fusion.check(match, other, ModuleFacts("other"))
    assert [spec.name for spec in fusion.layers(match, other, ModuleFacts("other"))] == ["gate_up_proj"]
