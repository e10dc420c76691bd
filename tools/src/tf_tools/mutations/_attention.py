"""Faults of attention: scale, soft cap, sink, window, the order of heads."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tf_tools.mutations._anatomy import (
    Anatomy,
    Attention,
    AttentionArguments,
    changed_attention,
)
from tf_tools.mutations._mutation import Mutation, Site, altered, attribute_set
from tf_tools.mutations._ops import first_operand, replace_op

Change = Callable[[Attention, AttentionArguments], Any]


def _at(attention: Attention, change: Change) -> Site:
    def apply(module: nn.Module, arguments: AttentionArguments) -> Any:
        return change(attention, arguments) if module is attention.module else None

    return Site(attention.name, lambda: changed_attention(apply))


def _each(change: Change, has: Callable[[Attention], bool] = lambda _: True) -> Callable[[Anatomy], Iterable[Site]]:
    return lambda anatomy: [_at(a, change) for a in anatomy.attentions if has(a)]


def _scale_larger(attention: Attention, arguments: AttentionArguments) -> None:
    arguments["scaling"] = attention.scaling * 1.2


def _scale_of_head_dim(attention: Attention, arguments: AttentionArguments) -> None:
    arguments["scaling"] = attention.head_dim**-0.5


def _declares_scale(attention: Attention) -> bool:
    return not math.isclose(attention.scaling, 1 / math.sqrt(attention.head_dim), rel_tol=1e-6)


def _soft_cap(anatomy: Anatomy) -> Iterator[Site]:
    names = {a.name for a in anatomy.attentions}
    for op in anatomy.ops:
        if op.kind == "tanh" and op.owner in names:
            yield Site(op.owner, partial(replace_op, anatomy.model, op.owner, "tanh", first_operand, turn=op.turn))


def _sink(anatomy: Anatomy) -> Iterator[Site]:
    for attention in anatomy.attentions:
        sinks = getattr(attention.module, "sinks", None)
        if isinstance(sinks, nn.Parameter):
            yield Site(attention.name, partial(altered, sinks, lambda v: torch.full_like(v, float("-inf"))))


def _with_window(size: Callable[[int], int | None]) -> Change:
    """The mask of a layer that sees the last `size(window)` keys; None is all of them."""

    def change(attention: Attention, arguments: AttentionArguments) -> None:
        mask = arguments["attention_mask"]
        assert attention.window is not None
        arguments["attention_mask"] = _window_mask(mask, size(attention.window))

    return change


def _window_mask(mask: Tensor, window: int | None) -> Tensor:
    queries = torch.arange(mask.shape[-2])[:, None] + mask.shape[-1] - mask.shape[-2]
    distance = queries - torch.arange(mask.shape[-1])[None]
    visible = (distance >= 0) & (distance < (window or mask.shape[-1]))
    return torch.where(visible, 0.0, torch.finfo(mask.dtype).min).to(mask.dtype).expand_as(mask)


def _is_windowed(attention: Attention) -> bool:
    return attention.window is not None


def _window_on_full(anatomy: Anatomy) -> Iterator[Site]:
    window = next((a.window for a in anatomy.attentions if a.window is not None), None)
    if window is None:
        return

    def change(_: Attention, arguments: AttentionArguments) -> None:
        arguments["attention_mask"] = _window_mask(arguments["attention_mask"], window)

    yield from (_at(a, change) for a in anatomy.attentions if a.window is None)


def _heads_tiled(attention: Attention, arguments: AttentionArguments) -> Callable[[], None]:
    """Query head h reads kv head h mod n instead of h div n."""
    repeats = attention.query_heads // attention.key_heads
    for name in ("key", "value"):
        arguments[name] = arguments[name].repeat(1, repeats, 1, 1)
    undo = contextlib.ExitStack()
    undo.enter_context(attribute_set(attention.module, "num_key_value_groups", 1))
    return undo.close


def _is_grouped(attention: Attention) -> bool:
    return 1 < attention.key_heads < attention.query_heads and hasattr(attention.module, "num_key_value_groups")


ATTENTION = (
    Mutation("attention.scale", "scores scaled by 1.2 times what the model says", _each(_scale_larger)),
    Mutation(
        "attention.scale-guessed",
        "head_dim**-0.5 in place of the declared scale",
        _each(_scale_of_head_dim, _declares_scale),
    ),
    Mutation("attention.soft-cap", "no soft cap on the scores", _soft_cap),
    Mutation("attention.sink", "no sink in the softmax", _sink),
    Mutation("attention.kv-head-order", "kv heads tiled instead of repeated", _each(_heads_tiled, _is_grouped)),
    Mutation("window.dropped", "a sliding layer sees all keys", _each(_with_window(lambda _: None), _is_windowed)),
    Mutation("window.wide", "the window has one key too many", _each(_with_window(lambda w: w + 1), _is_windowed)),
    Mutation("window.narrow", "the window has one key too few", _each(_with_window(lambda w: w - 1), _is_windowed)),
    Mutation("window.added", "a full layer gets the window of the others", _window_on_full),
)
