"""Expressions that one operation or several can spell: square, square root and its reciprocal, division, silu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from fx_match._arguments import bind
from fx_match._canonical import canonical
from fx_match._nodes import act, op
from fx_match._pattern import Pattern, as_pattern
from fx_match._state import Run, State


@dataclass(frozen=True, slots=True)
class _SelfProduct(Pattern):
    """`x * x`: a product whose two operands are one value."""

    inner: Pattern

    def match(self, value: Any, state: State, run: Run) -> Iterator[State]:
        bound = bind(value) if isinstance(value, fx.Node) and canonical(value) == "mul" else None
        factors = tuple(bound.values.values())[:2] if bound is not None else ()
        if len(factors) == 2 and isinstance(factors[0], fx.Node) and factors[0] is factors[1]:
            yield from self.inner.match(factors[0], state.cover(value), run)


def square(x: object) -> Pattern:
    """`x.pow(2)`, `x ** 2`, `torch.square(x)`, `x * x`."""
    return op("square")(x) | op("pow")(x, 2) | _SelfProduct(as_pattern(x))


def sqrt(x: object) -> Pattern:
    """`torch.sqrt(x)`, `x ** 0.5`."""
    return op("sqrt")(x) | op("pow")(x, 0.5)


def reciprocal(x: object) -> Pattern:
    """`1 / x`, `torch.reciprocal(x)`, `x ** -1`."""
    return op("reciprocal")(x) | op("div")(1, x) | op("pow")(x, -1)


def rsqrt(x: object) -> Pattern:
    """`torch.rsqrt(x)`, `x ** -0.5`, `1 / torch.sqrt(x)`."""
    return op("rsqrt")(x) | op("pow")(x, -0.5) | reciprocal(sqrt(x))


def times_rsqrt(a: object, x: object) -> Pattern:
    """`a * rsqrt(x)` in either order, `a / sqrt(x)`."""
    return op("mul")(a, rsqrt(x)) | op("div")(a, sqrt(x))


def silu(x: Pattern) -> Pattern:
    """A function or module that computes silu, or `x * sigmoid(x)` spelt out; `x` must capture, to be the same twice."""
    return act("silu")(x) | op("mul")(x, act("sigmoid")(x))
