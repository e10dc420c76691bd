"""Where code spells a choice: in the forward, in what it calls, behind decorators; not in what it never reaches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from moe_runner._spelling import choices_spelled
from torch import Tensor, nn


def pick(x: Tensor) -> Tensor:
    return torch.topk(x, 2).indices


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1

    def generate(self, x: Tensor) -> Tensor:
        return x.topk(2).indices


class InForward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return next(part.topk(2).indices for part in (x,))


class InFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return pick(x)


class InMethod(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.generate(x)


class ThroughSuper(InForward):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Bare(nn.Module):
    @bare
    def forward(self, x: Tensor) -> Tensor:
        return x.topk(2).indices


class Wrapped(nn.Module):
    @functools.lru_cache  # noqa: B019 - any decorator that keeps `__wrapped__`
    def forward(self, x: Tensor) -> Tensor:
        return x.topk(2).indices


def test_a_mention_names_module_line_and_text() -> None:
    (mention,) = choices_spelled(InFunction())
    assert mention.op == "topk"
    assert mention.is_top_k
    assert str(mention) == f"{__name__}:{pick.__code__.co_firstlineno + 1}: return torch.topk(x, 2).indices"


def test_all_ways_from_the_forward_are_followed() -> None:
    for module in (InForward(), InMethod(), ThroughSuper(), Bare(), Wrapped()):
        assert [mention.op for mention in choices_spelled(module)] == ["topk"], type(module).__name__


def test_a_function_held_by_the_instance_and_a_forward_put_on_it() -> None:
    held, replaced = Plain(), InForward()
    held.pick = pick
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    assert [mention.op for mention in choices_spelled(held)] == ["topk"]
    assert choices_spelled(replaced) == ()


def test_what_the_forward_does_not_reach_is_not_counted() -> None:
    for module in (Plain(), nn.Linear(2, 2), nn.ModuleList([InForward()]), nn.Module()):
        assert choices_spelled(module) == ()


def test_a_maximum_is_a_weaker_sign_than_a_top_k() -> None:
    class Stable(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.max(dim=-1, keepdim=True).values

    (mention,) = choices_spelled(Stable())
    assert mention.op == "max"
    assert not mention.is_top_k
