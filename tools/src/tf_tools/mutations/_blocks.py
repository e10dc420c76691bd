"""Faults of what a block computes: residual adds, caps, clamps and scales. Found and broken as operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from tf_tools.mutations._anatomy import Anatomy
from tf_tools.mutations._mutation import Mutation, Site, attribute_set
from tf_tools.mutations._ops import Op, first_operand, is_scalar, replace_op


def _where(op: Op) -> str:
    return f"{op.owner or 'head model'}:{op.kind}:{op.turn}"


def _dropped(anatomy: Anatomy, op: Op) -> Site:
    return Site(_where(op), partial(replace_op, anatomy.model, op.owner, op.kind, first_operand, turn=op.turn))


def _residual(anatomy: Anatomy) -> Iterator[Site]:
    for add in anatomy.residual_adds:
        branch = partial(_operand, 1 - add.residual)
        broken = partial(replace_op, anatomy.model, add.layer, "add", branch, turn=add.turn)
        yield Site(f"{add.layer}:add:{add.turn}", broken)


def _operand(index: int, op: Op) -> Any:
    return op.args[index]


def _final_cap(anatomy: Anatomy) -> Iterator[Site]:
    yield from (_dropped(anatomy, op) for op in anatomy.ops if op.kind == "tanh" and op.owner == "")


def _scales(kind: str) -> Callable[[Anatomy], Iterable[Site]]:
    def find(anatomy: Anatomy) -> Iterator[Site]:
        # A division and a product around a tanh are the soft cap, which has its own mutation.
        if kind == "logits" and any(_final_cap(anatomy)):
            return
        yield from (_dropped(anatomy, op) for k, op in anatomy.scales if k == kind)

    return find


def _clamps(sides: int) -> Callable[[Anatomy], Iterable[Site]]:
    """Clamps by how many sides they bound: one in gpt_oss's gate, two in its up."""

    def find(anatomy: Anatomy) -> Iterator[Site]:
        owners = dict.fromkeys(op.owner for op in anatomy.ops if op.kind == "clamp" and _bounds(op) == sides)
        for owner in owners:
            yield Site(owner, partial(replace_op, anatomy.model, owner, "clamp", partial(_unclamped, sides)))

    return find


def _bounds(op: Op) -> int:
    return sum(b is not None for b in (*op.args[1:], *op.kwargs.values()))


def _unclamped(sides: int, op: Op) -> Any:
    return first_operand(op) if _bounds(op) == sides else op.run()


def _alpha(anatomy: Anatomy) -> Iterator[Site]:
    for name, module in anatomy.experts:
        if isinstance(getattr(module, "alpha", None), float):
            yield Site(name, partial(attribute_set, module, "alpha", 1.0))


def _expert_offset(anatomy: Anatomy) -> Iterator[Site]:
    owners = {n for n, _ in anatomy.experts}
    found = (op.owner for op in anatomy.ops if op.kind == "add" and op.owner in owners and _adds_number(op))
    for owner in dict.fromkeys(found):
        yield Site(owner, partial(replace_op, anatomy.model, owner, "add", _without_number))


def _adds_number(op: Op) -> bool:
    return any(is_scalar(a) and not isinstance(a, torch.Tensor) for a in op.args)


def _without_number(op: Op) -> Any:
    return first_operand(op) if _adds_number(op) else op.run()


BLOCKS = (
    Mutation("residual.dropped", "a branch replaces the residual stream instead of adding to it", _residual),
    Mutation("residual.scale", "a branch's multiplier dropped", _scales("branch")),
    Mutation("embedding.scale", "the embedding's multiplier dropped", _scales("embedding")),
    Mutation("logits.scale", "the logits' multiplier dropped", _scales("logits")),
    Mutation("logits.soft-cap", "no soft cap on the logits", _final_cap),
    Mutation("experts.gate-clamp", "no one-sided clamp in the experts", _clamps(1)),
    Mutation("experts.up-clamp", "no two-sided clamp in the experts", _clamps(2)),
    Mutation("experts.alpha", "the experts' sigmoid gain taken for 1", _alpha),
    Mutation("experts.up-offset", "the number added to up dropped", _expert_offset),
)
