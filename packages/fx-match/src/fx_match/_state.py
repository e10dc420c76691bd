"""The state of one attempt to match, and the run that keeps the nearest miss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fx_match._arguments import bind
from fx_match._subject import Subject


@dataclass(frozen=True, slots=True)
class State:
    """Captures so far, nodes covered so far, and nodes that must have no user outside the finished match."""

    captures: Mapping[str, object] = field(default_factory=dict)
    covered: tuple[fx.Node, ...] = ()
    confined: tuple[fx.Node, ...] = ()

    def capture(self, name: str, value: object) -> State:
        return State({**self.captures, name: value}, self.covered, self.confined)

    def cover(self, value: object) -> State:
        if not isinstance(value, fx.Node) or value in self.covered:
            return self
        return State(self.captures, (*self.covered, value), self.confined)

    def confine(self, *nodes: object) -> State:
        found = tuple(node for node in nodes if isinstance(node, fx.Node))
        return State(self.captures, self.covered, (*self.confined, *found))


@dataclass(slots=True)
class Failure:
    """Why an attempt ended, and how far it had come."""

    state: State
    value: object
    reason: str


class Run:
    """One search in one subject."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.best: Failure | None = None

    def fail(self, state: State, value: object, reason: str) -> None:
        """Remember the failure of the attempt that covered the most nodes; the first of several."""
        if self.best is None or len(state.covered) > len(self.best.state.covered):
            self.best = Failure(state, value, reason)

    def constant(self, value: object) -> object:
        """A Python constant, or the number in a 0-dimensional tensor with data; None for anything else."""
        if not isinstance(value, fx.Node):
            return value
        tensor = self.subject.tensor(value)
        if tensor is None or tensor.dim() != 0 or tensor.is_meta or isinstance(tensor, torch.nn.Parameter):
            return value
        if type(tensor) is not torch.Tensor:  # a fake tensor has no data either
            return value
        return tensor.item()

    def first_operand(self, node: fx.Node) -> Any:
        bound = bind(node)
        if bound is not None:
            return next(iter(bound.values.values()), None)
        return node.args[0] if node.args else None
