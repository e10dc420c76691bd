"""Gated MLP: spellings that fuse, near misses that do not, and instances that a match does not speak for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ast_rewrite import FunctionSource, Patch, Refused
from torch import nn
from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions import GatedMLP, ModuleFacts
from vllm_layers_bridge.specs import ActivationAndMulSpec, MergedLinearSpec, Source

HIDDEN, WIDTH = 8, 12
FUSED_LINE = "self.act_and_mul(self.gate_up_proj(x))"
MERGED_LINE = "gate_output, up_output = self.gate_up_proj(x).chunk(2, dim=-1)"
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


class FunctionalGLUMLP(_Base):
    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TorchMulGLUMLP(_Base):
    def forward(self, x):
        return self.down(torch.mul(nn.functional.silu(self.gate(x)), self.up(x)))


class KeywordGLUMLP(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(input=x)) * self.up(input=x))


class NarrowGLUMLP(_Base):
    def forward(self, x):
        return self.down(
            self.act(
                self.gate(x),  # the gate
            )
            * self.up(x)
        )


class BiasedGLUMLP(GLUMLP):
    bias = True


class GeluGLUMLP(GLUMLP):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GELU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class TanhGeluGLUMLP(_Base):
    def forward(self, x):
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


class OwnNamesGLUMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(HIDDEN, WIDTH, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.w2 = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class StatementsGLUMLP(_Base):
    def forward(self, x):
        gate = self.act(self.gate(x))
        up = self.up(x)
        hidden = gate * up
        return self.down(hidden)


class InPlaceProductGLUMLP(_Base):
    def forward(self, x):
        hidden = self.act(self.gate(x))
        hidden *= self.up(x)
        return self.down(hidden)


class ReshapedGLUMLP(_Base):
    def forward(self, x):
        shape = x.shape
        x = x.view(-1, shape[-1])
        out = self.down(self.act(self.gate(x)) * self.up(x))
        return out.view(shape)


class LocalActivationGLUMLP(_Base):
    def forward(self, x):
        act = self.act
        return self.down(act(self.gate(x)) * self.up(x))


class FlaggedGLUMLP(_Base):
    flag = True

    def forward(self, x):
        if self.flag:
            return self.down(self.act(self.gate(x)) * self.up(x))
        return self.down(self.up(x)) + self.gate(x).sum()


WHOLE = [
    (GLUMLP, "silu"),
    (ReversedGLUMLP, "silu"),
    (FunctionalGLUMLP, "silu"),
    (TorchMulGLUMLP, "silu"),
    (KeywordGLUMLP, "silu"),
    (NarrowGLUMLP, "silu"),
    (BiasedGLUMLP, "silu"),
    (GeluGLUMLP, "gelu"),
    (TanhGeluGLUMLP, "gelu_tanh"),
    (OwnNamesGLUMLP, "silu"),
    (ReshapedGLUMLP, "silu"),
    (FlaggedGLUMLP, "silu"),
]
STATEMENTS = [StatementsGLUMLP, InPlaceProductGLUMLP, LocalActivationGLUMLP]


@pytest.mark.parametrize(("cls", "activation"), WHOLE, ids=lambda value: getattr(value, "__name__", value))
def test_one_expression_becomes_one_call(fuse: Callable[..., Any], cls: type[nn.Module], activation: str) -> None:
    module = cls()
    fused = fuse(GatedMLP(), module, X)
    assert FUSED_LINE in fused.text
    gate, up = ("w1", "w3") if cls is OwnNamesGLUMLP else ("gate", "up")
    assert fused.specs == (
        MergedLinearSpec(
            "gate_up_proj", (Source(gate, 0, WIDTH), Source(up, 1, WIDTH)), HIDDEN, bias=cls is BiasedGLUMLP
        ),
        ActivationAndMulSpec("act_and_mul", activation),
    )


@pytest.mark.parametrize("cls", STATEMENTS)
def test_projections_in_several_statements_are_merged_and_the_rest_stays(
    fuse: Callable[..., Any], cls: type[nn.Module]
) -> None:
    fused = fuse(GatedMLP(), cls(), X)
    assert MERGED_LINE in fused.text
    assert "act_and_mul" not in fused.text
    assert [spec.name for spec in fused.specs] == ["gate_up_proj"]


def test_the_comment_inside_a_replaced_expression_is_the_only_text_lost(fuse: Callable[..., Any]) -> None:
    text = fuse(GatedMLP(), FlaggedGLUMLP(), X).text
    original = FunctionSource.of(FlaggedGLUMLP.forward).dedented
    assert text.split("\n", 2)[2] == original.replace("self.act(self.gate(x)) * self.up(x)", FUSED_LINE), (
        "nothing but the product changed"
    )


class SizeChoosesActivation(_Base):
    def forward(self, x):
        act = self.act if x.shape[1] > 2 else F.relu
        return self.down(act(self.gate(x)) * self.up(x))


class SizeChoosesActivationInside(_Base):
    def forward(self, x):
        return self.down((self.act if x.shape[1] > 2 else F.relu)(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("cls", [SizeChoosesActivation, SizeChoosesActivationInside])
def test_a_choice_by_size_survives_the_rewrite(fuse: Callable[..., Any], cls: type[nn.Module]) -> None:
    fused = fuse(GatedMLP(), cls(), X)
    assert "F.relu" in fused.text
    assert [spec.name for spec in fused.specs] == ["gate_up_proj"]


class InALoop(_Base):
    def forward(self, x):
        parts = []
        for part in x.split(2, dim=1):
            parts.append(self.down(self.act(self.gate(part)) * self.up(part)))
        return torch.cat(parts, dim=1)


class InAComprehension(_Base):
    def forward(self, x):
        return torch.cat([self.down(self.act(self.gate(part)) * self.up(part)) for part in x.split(4, dim=1)], dim=1)


class InAConditional(_Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x)) if x.shape[1] > 2 else self.down(self.up(x) * 0)


class WithOneToken(_Base):
    def forward(self, x):
        if x.shape[1] == 1:
            return x * 3
        return self.down(self.act(self.gate(x)) * self.up(x))


class MoreAround(_Base):
    def forward(self, x):
        x = x + 1
        y = 2 * (self.act(self.gate(x)) * self.up(x)) - self.up.in_features
        x = x * 3
        return self.down(y) + x


class RepeatedActivation(_Base):
    def forward(self, x):
        return self.act(self.down(self.act(self.gate(x)) * self.up(x)))


COMPUTE = [
    *(cls for cls, _ in WHOLE), *STATEMENTS, SizeChoosesActivation, SizeChoosesActivationInside, InALoop, InAComprehension,
    WithOneToken, RepeatedActivation,
]  # fmt: skip


@pytest.mark.parametrize("cls", COMPUTE)
def test_the_rewritten_forward_computes_what_it_did_at_every_size(
    fuse: Callable[..., Any], cls: type[nn.Module]
) -> None:
    module = cls().requires_grad_(False)
    inputs = [torch.randn(1, tokens, HIDDEN) for tokens in (1, 2, 3, 4, 9)]
    expected = [module(x.clone()) for x in inputs]
    fused = fuse(GatedMLP(), module, X[:, :2] if cls is InALoop else X)
    applied = fused.apply_plain()
    for x, y in zip(inputs, expected, strict=True):
        torch.testing.assert_close(applied(x.clone()), y, rtol=1e-5, atol=1e-6)


# Near misses


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


class SigmoidGate(_Base):
    def forward(self, x):
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


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


NEAR = [
    (GateUsedTwice, "the output of `gate` is used outside of the product too, by `sum`"),
    (GateCalledTwice, "`gate` is called 2 times, so its weight cannot move into a merged layer"),
    (GateWeightRead, "the forward reads `gate.weight` beside calling `gate`"),
    (MoreAround, "the forward reads `up.in_features` beside calling `up`"),
    (GateWidthRead, "the forward reads `gate.out_features` beside calling `gate`"),
    (DifferentInputs, "`gate` and `up` read different inputs"),
    (InputReboundBetween, "`gate` and `up` read different inputs"),
    (InputWrittenBetween, "`add` writes in place to the input"),
    (GateClamped, "`clamp` stands between `gate` and its activation"),
    (ActivatedGateClamped, "`clamp` stands between the activation and the product"),
    (UpClamped, "`clamp` stands between `up` and the product"),
    (UpPlusOne, "`add` stands between `up` and the product"),
    (SigmoidGate, "the activation is sigmoid; vLLM's fused layers have gelu, gelu_tanh, silu"),
    (ActivationAfterProduct, "the activation comes after the product of `gate` and `up`"),
    (NoActivation, "neither `gate` nor `up` is activated before the product"),
    (UnknownActivation, "`sin` is no activation that is known"),
    (OneLinearTwice, "both factors come from the one call of `gate`"),
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
    match = fusion.match(traced(StatementsGLUMLP(), X))
    other = _changed(lambda module: setattr(module, "act", nn.ReLU()), StatementsGLUMLP)
    fusion.check(match, other, ModuleFacts("other"))
    assert [spec.name for spec in fusion.layers(match, other, ModuleFacts("other"))] == ["gate_up_proj"]


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
