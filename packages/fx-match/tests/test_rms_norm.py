"""RMS norm, in every spelling in use, as one pattern; and what it must tell apart."""

import pytest
import torch
import torch.nn.functional as F
from fx_match import (
    Match,
    Miss,
    Pattern,
    any_value,
    argument,
    canonical,
    const,
    find,
    op,
    opt,
    param,
    scalar,
    square,
    times_rsqrt,
    trace,
    whole,
)
from torch import nn


def rms_norm() -> Pattern:
    """x / sqrt(mean(x^2) + eps), then perhaps a weight, 1 + weight, and casts; the whole forward."""
    cast = op("cast")
    x = opt(cast.named("cast_in"))(any_value("x"))
    mean = op("mean", dim=-1, keepdim=True)(square(x))
    normed = opt(cast.named("cast_before"))(times_rsqrt(x, mean + scalar("eps")))
    weight = opt(cast.named("cast_weight"))(param("weight"))
    scaled = (const(1) + weight).named("offset") * normed | weight * normed
    functional = op("rms_norm", weight=param("weight") | const(None), eps=scalar("eps"))(any_value("x"))
    return whole(opt(cast.named("cast_after"))(scaled | normed | functional))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.eps = 1e-6


class Llama(Base):
    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


class Gemma(Base):
    def forward(self, x):
        y = self._norm(x.float())
        y = y * (1.0 + self.weight.float())
        return y.type_as(x)

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Olmo(Base):
    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.square().mean(dim=-1, keepdim=True)
        return (self.weight * (x * torch.pow(variance + self.eps, -0.5))).to(dtype)


class Product(Base):
    def forward(self, x):
        return x * torch.mean(x * x, dim=-1, keepdim=True).add(self.eps).rsqrt() * self.weight


class Divided(Base):
    def forward(self, x):
        return x / torch.sqrt(torch.mean(torch.square(x), 2, True) + self.eps) * self.weight


class Reciprocal(Base):
    def forward(self, x):
        return x * (1 / torch.sqrt(self.eps + (x**2).mean((-1,), keepdim=True))) * self.weight


class Weightless(Base):
    def forward(self, x):
        return (x.float() * (x.float().pow(2).mean(-1, keepdim=True) + self.eps) ** -0.5).type_as(x)


class WeightlessOnce(Base):
    def forward(self, x):
        y = x.float()
        return (y * (y.pow(2).mean(-1, keepdim=True) + self.eps) ** -0.5).type_as(x)


class Functional(Base):
    def forward(self, x):
        return F.rms_norm(x, (4,), self.weight, self.eps)


class FunctionalWeightless(Base):
    def forward(self, x):
        return F.rms_norm(x, (4,), eps=self.eps)


class InPlace(Base):
    def forward(self, x):
        y = x.pow(2).mean(-1, keepdim=True)
        y += self.eps
        return y.rsqrt_().mul(x) * self.weight


X = torch.zeros(2, 3, 4, dtype=torch.bfloat16)


def match(module: nn.Module) -> Match | Miss:
    traced = trace(module, (X,))
    assert traced.complete, traced.stop
    return find(rms_norm(), traced)


SPELLINGS = {
    Llama: {"cast_in", "cast_before", "weight"},
    Gemma: {"cast_in", "cast_weight", "offset", "weight", "cast_after"},
    Olmo: {"cast_in", "weight", "cast_after"},
    Product: {"weight"},
    Divided: {"weight"},
    Reciprocal: {"weight"},
    WeightlessOnce: {"cast_in", "cast_after"},
    Functional: {"weight"},
    FunctionalWeightless: set(),
    InPlace: {"weight"},
}


@pytest.mark.parametrize("module", SPELLINGS)
def test_every_spelling_matches_and_tells_what_it_is(module) -> None:
    found = match(module())
    assert isinstance(found, Match), found
    assert found["eps"] == 1e-6
    assert found["x"].op == "placeholder"
    assert set(found.captures) == SPELLINGS[module] | {"eps", "x"}
    assert found.is_whole
    assert found.uncovered == ()


def test_the_cast_in_tells_its_dtype() -> None:
    assert argument(match(Llama())["cast_in"], "dtype") is torch.float32
    assert argument(match(Llama())["cast_before"], "dtype") is torch.bfloat16


# Near misses


class MeanAway(Base):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class OtherInput(Base):
    def forward(self, x):
        return x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class NoKeepdim(Base):
    def forward(self, x):
        return x.transpose(0, -1) * torch.rsqrt(x.pow(2).mean(-1).t() + self.eps)


class OtherDim(Base):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps) * self.weight


class Cubed(Base):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + self.eps) * self.weight


class TwoOffset(Base):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (2.0 + self.weight)


class ScaledEps(Base):
    def forward(self, x):
        return x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), self.eps, alpha=2)) * self.weight


class MeanInDouble(Base):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True, dtype=torch.float64) + self.eps) * self.weight


class AndMore(Base):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight + 1


class AndAside(Base):
    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return y, x.abs()


class WritesItsInput(Base):
    def forward(self, x):
        x *= torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * self.weight


class EpsPerChannel(Base):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.weight) * self.weight


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (MeanAway, "not covered by the pattern"),
        (OtherInput, "'x' is already"),
        (NoKeepdim, "mean"),
        (OtherDim, r"expected the constant \(2,\), found \(1,\)"),
        (Cubed, "expected the constant 2, found 3"),
        (TwoOffset, "expected the constant 1, found 2.0"),
        (ScaledEps, "found add_scaled"),
        (MeanInDouble, "mean has dtype=torch.float64, which the pattern does not allow for"),
        (AndMore, "expected cast, found add; or expected mul, found add"),
        (AndAside, "is not what the forward returns"),
        (WritesItsInput, "writes in place into x, which lives on outside"),
        (EpsPerChannel, "expected a number, found weight"),
        (Weightless, "'cast_in' is already"),
    ],
)
def test_near_misses_are_missed_with_the_reason(module, reason) -> None:
    import re

    found = match(module())
    assert isinstance(found, Miss), found
    assert not found
    assert re.search(reason, found.reason), found.reason
    assert found.depth > 0 or module in (AndMore, AndAside)
    assert found.line.startswith(__file__)


def test_the_nearest_miss_names_node_and_line() -> None:
    found = match(Cubed())
    assert canonical(found.node) == "pow"
    assert found.span is not None
    assert found.span.lineno == Cubed.forward.__code__.co_firstlineno + 1
