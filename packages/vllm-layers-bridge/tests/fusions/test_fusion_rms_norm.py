"""RMS norm: spellings that become vLLM's layer, norms that do not, and calls that its layer does not take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions import ModuleFacts, RMSNorm
from vllm_layers_bridge.specs import RMSNormSpec

N = 8
X = torch.empty(1, 3, N, device="meta")


class LlamaOrder(nn.Module):
    def __init__(self, size: int = N, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        input_dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(input_dtype)


class OlmoOrder(LlamaOrder):
    def forward(self, x):
        input_dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return (self.weight * x).to(input_dtype)


class GemmaOrder(LlamaOrder):
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return (self._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


class WidenedAfterTheCast(LlamaOrder):
    def forward(self, x):
        wide = x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed.to(x.dtype) * self.weight.float()).to(x.dtype)


class PowMinusHalf(LlamaOrder):
    def forward(self, x):
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).pow(-0.5) * self.weight


class PowOperators(LlamaOrder):
    def forward(self, x):
        return x * (self.eps + (x**2).mean(dim=2, keepdim=True)) ** -0.5 * self.weight


class DivisionBySqrt(LlamaOrder):
    def forward(self, x):
        return self.weight * (x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + self.eps))


class ReciprocalOfSqrt(LlamaOrder):
    def forward(self, x):
        return self.weight * (x * (1 / (torch.square(x).mean((-1,), True) + self.eps).sqrt()))


class TorchFunction(LlamaOrder):
    def forward(self, x):
        return F.rms_norm(x, (N,), self.weight, self.eps)


class TorchFunctionThenWeight(LlamaOrder):
    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, eps=self.eps).type_as(x) * self.weight


class Weightless(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class WithoutScale(LlamaOrder):
    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.scaled = scaled
        if not scaled:
            del self.weight

    def forward(self, x):
        normed = x * torch.pow(x.pow(2).mean(-1, keepdim=True) + self.eps, -0.5)
        if self.scaled:
            normed = normed * self.weight
        return normed


SPELLINGS = [
    (LlamaOrder(), RMSNormSpec(N, 1e-6, 0.0, True, scaled_in="input")),
    (LlamaOrder(eps=1e-3), RMSNormSpec(N, 1e-3, 0.0, True, scaled_in="input")),
    (WidenedAfterTheCast(), RMSNormSpec(N, 1e-6, 0.0, True, scaled_in=None)),
    (OlmoOrder(), RMSNormSpec(N, 1e-6, 0.0, True)),
    (GemmaOrder(), RMSNormSpec(N, 1e-6, 1.0, True)),
    (PowMinusHalf(), RMSNormSpec(N, 1e-6, 0.0, True)),
    (PowOperators(), RMSNormSpec(N, 1e-6, 0.0, True)),
    (DivisionBySqrt(), RMSNormSpec(N, 1e-6, 0.0, True)),
    (ReciprocalOfSqrt(), RMSNormSpec(N, 1e-6, 0.0, True)),
    (TorchFunction(), RMSNormSpec(N, 1e-6, 0.0, True)),
    (TorchFunctionThenWeight(), RMSNormSpec(N, 1e-6, 0.0, True, scaled_in="input")),
    (Weightless(), RMSNormSpec(N, 1e-5, 0.0, False)),
    (WithoutScale(True), RMSNormSpec(N, 1e-6, 0.0, True)),
    (WithoutScale(False), RMSNormSpec(N, 1e-6, 0.0, False)),
]


@pytest.mark.parametrize(("module", "spec"), SPELLINGS, ids=lambda value: type(value).__name__)
def test_spelling_becomes_one_layer(fuse: Callable[..., Any], module: nn.Module, spec: RMSNormSpec) -> None:
    fused = fuse(RMSNorm(), module, X)
    assert fused.specs == (spec,)
    assert fused.rewrite is None


@pytest.mark.parametrize("cls", [LlamaOrder, OlmoOrder, GemmaOrder])
def test_casts_of_a_half_precision_model_are_seen_through(fuse: Callable[..., Any], cls: type[nn.Module]) -> None:
    fused = fuse(RMSNorm(), cls().to(torch.bfloat16), X.to(torch.bfloat16))
    assert fused.specs[0].has_weight


def test_eps_and_size_are_the_instances_own(traced: Callable[..., Any]) -> None:
    fusion, other = RMSNorm(), LlamaOrder(2 * N, eps=1e-6)
    match = fusion.match(traced(LlamaOrder(), X))
    facts = ModuleFacts("other", args=(torch.empty(1, 3, 2 * N, device="meta"),))
    fusion.check(match, other, facts)
    assert fusion.layers(match, other, facts) == (RMSNormSpec(2 * N, 1e-6, 0.0, True, scaled_in="input"),)


# Norms that are others


class MeanSubtracted(LlamaOrder):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class TorchLayerNorm(LlamaOrder):
    def forward(self, x):
        return F.layer_norm(x, (N,), self.weight, None, self.eps)


class SumOfSquares(LlamaOrder):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps))


class EpsOutsideRoot(LlamaOrder):
    def forward(self, x):
        return self.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps))


class TimesTwo(LlamaOrder):
    def forward(self, x):
        return 2 * (self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)))


class TwoOutputs(LlamaOrder):
    def forward(self, x):
        y = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))
        return y, x


class WithoutKeepdim(LlamaOrder):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1) + self.eps).unsqueeze(-1))


class OverAllAxes(LlamaOrder):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + self.eps))


class Cubed(LlamaOrder):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + self.eps))


class RootNotReciprocal(LlamaOrder):
    def forward(self, x):
        return self.weight * (x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class WithoutEps(LlamaOrder):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)))


class DividedByWeight(LlamaOrder):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) / self.weight


class AnotherVariance(LlamaOrder):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + self.eps))


class LossyCast(LlamaOrder):
    def forward(self, x):
        y = x.to(torch.float16)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * y).to(x.dtype)


class StaysWide(LlamaOrder):
    def forward(self, x):
        x = x.double()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class EpsBuffer(LlamaOrder):
    def __init__(self) -> None:
        super().__init__()
        self.eps_buffer = torch.tensor(1e-6)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps_buffer))


class SetsAnAttribute(LlamaOrder):
    def forward(self, x):
        self.calls = 1
        return super().forward(x)


class AsksForSize(LlamaOrder):
    def forward(self, x):
        if x.shape[1] > 1000:
            return x
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class InPlace(LlamaOrder):
    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        x.mul_(2)
        return self.weight * y


class NormOfProduct(LlamaOrder):
    def forward(self, x):
        x = x * 2
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


OTHER_NORMS = [
    (MeanSubtracted, "it subtracts from its input, as a LayerNorm"),
    (TorchLayerNorm, "it is a LayerNorm"),
    (SumOfSquares, "root of a sum of squares"),
    (EpsOutsideRoot, "not x / sqrt(mean(x^2) + eps) * weight: expected sqrt, found add"),
    (TimesTwo, "it computes `mul` beside the norm"),
    (TwoOutputs, "it returns 2 values"),
    (WithoutKeepdim, "expected"),
    (OverAllAxes, "expected"),
    (Cubed, "expected"),
    (RootNotReciprocal, "expected"),
    (WithoutEps, "expected"),
    (DividedByWeight, "it computes `div` beside the norm"),
    (AnotherVariance, "is already"),
    (LossyCast, "it casts to torch.float16 on the way"),
    (StaysWide, "it returns torch.float64 for an input of torch.float32"),
    (EpsBuffer, "its eps is a tensor"),
    (SetsAnAttribute, "its forward sets `calls`, which would be lost with it"),
    (AsksForSize, "its forward asks for a size of its input"),
    (InPlace, "it computes `mul` beside the norm"),
    (NormOfProduct, "it computes `mul` beside the norm"),
]


@pytest.mark.parametrize(("cls", "reason"), OTHER_NORMS, ids=lambda value: getattr(value, "__name__", ""))
def test_another_norm_is_not_replaced_and_says_why(
    miss_of: Callable[..., Any], cls: type[nn.Module], reason: str
) -> None:
    miss = miss_of(RMSNorm(), cls(), X.clone())
    assert reason in miss.reason
    assert miss.node is not None


class TakesGate(LlamaOrder):
    def forward(self, x, gate=None):
        if gate is not None:
            x = x * 1.0
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class IgnoresSecond(LlamaOrder):
    def forward(self, x, other):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def test_a_second_tensor_would_be_taken_for_a_residual(miss_of: Callable[..., Any]) -> None:
    assert "given 2 tensors" in miss_of(RMSNorm(), IgnoresSecond(), X, X).reason


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (ModuleFacts("norm"), "how it is called is not known"),
        (ModuleFacts("norm", args=(), kwargs={"x": X}), "it is called with `x=`"),
        (ModuleFacts("norm", args=(X, None), kwargs={}), "it is called with 2 arguments"),
    ],
)
def test_a_call_that_the_layer_does_not_take(traced: Callable[..., Any], facts: ModuleFacts, reason: str) -> None:
    module = TakesGate()
    match = RMSNorm().match(traced(module, X))
    with pytest.raises(NotFusable, match=reason):
        RMSNorm().check(match, module, facts)


def test_a_second_parameter_at_its_default_is_no_hindrance(fuse: Callable[..., Any]) -> None:
    assert fuse(RMSNorm(), TakesGate(), X).specs == (RMSNormSpec(N, 1e-6, 0.0, True),)


class OtherOffset(LlamaOrder):
    def forward(self, x):
        return (0.5 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class OtherName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(N))

    def forward(self, x):
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class UnusedBias(LlamaOrder):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(N))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Hooked(LlamaOrder):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda *_: None)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def _with_weight(weight: torch.Tensor) -> nn.Module:
    module = LlamaOrder()
    module.weight = nn.Parameter(weight)
    return module


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (OtherOffset(), "an offset from 0.5"),
        (OtherName(), r"it holds \['scale'\]"),
        (UnusedBias(), r"it holds \['bias', 'weight'\]"),
        (Hooked(), "it has hooks"),
        (_with_weight(torch.ones(1)), "1 entries and its input 8"),
        (_with_weight(torch.ones(3, 1)), "its weight has 2 axes"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else value,
)
def test_an_instance_that_the_layer_cannot_hold(traced: Callable[..., Any], module: nn.Module, reason: str) -> None:
    match = RMSNorm().match(traced(module, X))
    assert match, str(match)
    with pytest.raises(NotFusable, match=reason):
        RMSNorm().check(match, module, ModuleFacts("norm", args=(X,), kwargs={}))


def test_a_weight_of_another_type_is_not_narrowed(traced: Callable[..., Any]) -> None:
    x = X.to(torch.bfloat16)
    match = RMSNorm().match(traced(OlmoOrder(), x))
    with pytest.raises(NotFusable, match=r"kept in torch.float32 beside an input of torch.bfloat16"):
        RMSNorm().check(match, OlmoOrder(), ModuleFacts("norm", args=(x,), kwargs={}))


def test_the_width_of_a_weightless_norm_must_be_known(traced: Callable[..., Any]) -> None:
    fusion, other = RMSNorm(), Weightless()
    match = fusion.match(traced(Weightless(), X))
    with pytest.raises(NotFusable, match="width of its input is not known"):
        fusion.check(match, other, ModuleFacts("other"))
    facts = ModuleFacts("other", args=(torch.empty(1, 3, 5, device="meta"),), kwargs={})
    fusion.check(match, other, facts)
    assert fusion.layers(match, other, facts)[0].hidden_size == 5


def test_what_has_no_norm_in_it_is_no_candidate(traced: Callable[..., Any]) -> None:
    class Scale(LlamaOrder):
        def forward(self, x):
            return x * self.weight

    assert not RMSNorm().is_candidate(traced(Scale(), X))
    assert not RMSNorm().is_candidate(traced(MeanSubtracted(), X)), "a LayerNorm is whole as it is"
    assert not RMSNorm().is_candidate(traced(nn.Sequential(LlamaOrder()), X))
    assert RMSNorm().is_candidate(traced(EpsOutsideRoot(), X))
