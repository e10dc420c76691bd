"""Faults of activations: another function, or the other form of GELU.

An activation is a module of `torch.nn` or of `transformers.activations`, or a call of a functional one elsewhere. Which
function a module computes is seen from its values, not from its name: `NewGELUActivation` and `GELUTanh` are one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tf_tools.mutations._anatomy import Anatomy
from tf_tools.mutations._mutation import Mutation, Site, output_changed
from tf_tools.mutations._ops import Op, first_operand, replace_op

_Function = Callable[[Tensor], Tensor]

_TANH_FORM: _Function = partial(functional.gelu, approximate="tanh")
_KNOWN: Mapping[str, _Function] = {
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu-tanh": _TANH_FORM,
}
_SWAPPED: Mapping[str, _Function] = {
    "silu": functional.gelu,
    "relu": functional.gelu,
    "gelu": functional.silu,
    "gelu-tanh": functional.silu,
}
_OTHER_FORM: Mapping[str, _Function] = {"gelu": _TANH_FORM, "gelu-tanh": functional.gelu}


def _replaced(other: Mapping[str, _Function]) -> Callable[[Anatomy], Iterator[Site]]:
    """Sites where the function that `other` names for a known activation takes its place."""

    def find(anatomy: Anatomy) -> Iterator[Site]:
        modules = {n: m for n, m in anatomy.model.named_modules() if _is_activation(m)}
        for name, module in modules.items():
            function = other.get(_which(module))
            if function is not None:
                yield Site(name, partial(output_changed, module, partial(_recomputed, function)))
        calls = ((op.owner, op.kind, _which_call(op)) for op in anatomy.ops if op.owner not in modules)
        for owner, kind, which in dict.fromkeys(calls):
            function = other.get(which)
            if function is not None:
                replacement = partial(_instead, function)
                yield Site(f"{owner}:{kind}", partial(replace_op, anatomy.model, owner, kind, replacement))

    return find


def _is_activation(module: nn.Module) -> bool:
    return type(module).__module__ in {"transformers.activations", "torch.nn.modules.activation"}


@torch.no_grad()
def _which(module: nn.Module) -> str:
    points = torch.linspace(-6, 6, 97)
    values = module(points)
    return next((n for n, f in _KNOWN.items() if torch.allclose(f(points), values, atol=2e-6, rtol=1e-5)), "")


def _which_call(op: Op) -> str:
    if op.kind == "gelu" and op.kwargs.get("approximate") == "tanh":
        return "gelu-tanh"
    return op.kind if op.kind in _KNOWN else ""


def _recomputed(function: _Function, args: tuple[Any, ...], _: object) -> Tensor:
    return function(args[0])


def _instead(function: _Function, op: Op) -> Tensor:
    return function(first_operand(op))


ACTIVATIONS = (
    Mutation("activation.swapped", "another activation: SiLU for GELU, GELU for SiLU and ReLU", _replaced(_SWAPPED)),
    Mutation("activation.gelu-form", "the tanh form of GELU for the exact one, or the reverse", _replaced(_OTHER_FORM)),
)
