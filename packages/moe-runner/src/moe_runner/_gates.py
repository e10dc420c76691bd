"""The formulas that may stand between the projections of an expert, to be compared with what a forward computes.

In: numbers that the forward used as constants. Out: every `Gate` that could be meant, with its function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from moe_runner.specs import Formula, Gate

GateFunction = Callable[[Tensor, Tensor], Tensor]

_PLAIN: dict[Formula, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x))),
    "relu": lambda x: x.clamp(min=0.0),
    "relu2": lambda x: x.clamp(min=0.0).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "identity": lambda x: x,
}
_QUICK = 1.702


def gate_function(gate: Gate) -> GateFunction:
    """The function of gate and up; of up alone where `gate` is not gated."""
    if gate.formula in _PLAIN:
        plain = _PLAIN[gate.formula]
        return (lambda g, u: plain(g) * u) if gate.gated else (lambda _, u: plain(u))
    assert gate.limit is not None
    if gate.formula == "silu_clamped":
        return _silu_clamped(gate.limit)
    assert gate.alpha is not None
    return _swiglu_oai(gate.limit, gate.alpha)


def candidates(constants: Iterable[float]) -> Iterator[Gate]:
    """Gates with each formula; limits and factors are among `constants`."""
    numbers = sorted({abs(number) for number in constants if math.isfinite(number) and number})
    for formula in _PLAIN:
        yield Gate(formula)
        yield Gate(formula, gated=False)
    for limit in numbers:
        yield Gate("silu_clamped", limit=limit)
        for alpha in dict.fromkeys((*numbers, 1.0)):
            yield Gate("swiglu_oai", limit=limit, alpha=alpha)


def _silu_clamped(limit: float) -> GateFunction:
    def apply(g: Tensor, u: Tensor) -> Tensor:
        g = g.clamp(max=limit)
        return g * torch.sigmoid(g) * u.clamp(-limit, limit)

    return apply


def _swiglu_oai(limit: float, alpha: float) -> GateFunction:
    def apply(g: Tensor, u: Tensor) -> Tensor:
        g = g.clamp(max=limit)
        return g * torch.sigmoid(alpha * g) * (u.clamp(-limit, limit) + 1.0)

    return apply
