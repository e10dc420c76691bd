"""Gated MLP: spellings that fuse, near misses that do not, and instances that a match does not speak for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ast_rewrite import FunctionSource
from torch import nn
from vllm_layers_bridge.fusions import GatedMLP
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


class ThreeStatementsGLUMLP(_Base):
    def forward(self, x):
        gate = self.gate(x)
        up = self.up(x)
        gate = self.act(gate)
        return self.down(up * gate)


class InputNameTakenGLUMLP(_Base):
    def forward(self, x):
        gate = self.gate(x)
        x = self.up(x)
        x = F.silu(gate) * x
        return self.down(x)


class BranchOnAnAttributeGLUMLP(_Base):
    scaled = False

    def forward(self, x):
        gate = self.act(self.gate(x))
        if self.scaled:
            x = x * 2
        up = self.up(x)
        return self.down(gate * up)


class GateReadElsewhereGLUMLP(_Base):
    verbose = False

    def forward(self, x):
        gate = self.gate(x)
        if self.verbose:
            print(gate)
        hidden = self.act(gate) * self.up(x)
        return self.down(hidden)


class ReluGLUMLP(_Base):
    def forward(self, x):
        return self.down(F.relu(self.gate(x)) * self.up(x))


class SigmoidGLUMLP(_Base):
    def forward(self, x):
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


SEVERAL = [StatementsGLUMLP, ThreeStatementsGLUMLP, InputNameTakenGLUMLP]
PROJECTIONS = [
    InPlaceProductGLUMLP, LocalActivationGLUMLP, GateReadElsewhereGLUMLP, ReluGLUMLP, SigmoidGLUMLP,
]  # fmt: skip


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


@pytest.mark.parametrize("cls", SEVERAL)
def test_several_statements_become_one_call(fuse: Callable[..., Any], cls: type[nn.Module]) -> None:
    fused = fuse(GatedMLP(), cls(), X)
    assert f"gated_output = {FUSED_LINE}\n" in fused.text
    assert "self.act(" not in fused.text
    assert "F.silu" not in fused.text
    assert [spec.name for spec in fused.specs] == ["gate_up_proj", "act_and_mul"]


@pytest.mark.parametrize("cls", PROJECTIONS)
def test_where_the_product_cannot_be_one_call_the_projections_are_merged_and_the_rest_stays(
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


class WithOneToken(_Base):
    def forward(self, x):
        if x.shape[1] == 1:
            return x * 3
        return self.down(self.act(self.gate(x)) * self.up(x))


class RepeatedActivation(_Base):
    def forward(self, x):
        return self.act(self.down(self.act(self.gate(x)) * self.up(x)))


COMPUTE = [
    *(cls for cls, _ in WHOLE), *SEVERAL, *PROJECTIONS, SizeChoosesActivation, SizeChoosesActivationInside, InALoop,
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
