"""The state of one attempt to match, and the run that keeps the nearest miss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fx_match._activation import activation
from fx_match._arguments import bind
from fx_match._subject import Subject

_REASONS = 4  # alternatives that are spelt out in a miss


@dataclass(frozen=True, slots=True)
class State:
    """Captures so far, nodes covered so far, and nodes that must have no user outside the finished match.

    steps: how many parts of the pattern have been matched, to tell which failed attempt came nearest.
    """

    captures: Mapping[str, object] = field(default_factory=dict)
    covered: tuple[fx.Node, ...] = ()
    confined: tuple[fx.Node, ...] = ()
    steps: int = 0

    def capture(self, name: str, value: object) -> State:
        return State({**self.captures, name: value}, self.covered, self.confined, self.steps)

    def cover(self, value: object) -> State:
        """`value` is matched; if it is a node, it belongs to the match."""
        covered = self.covered
        if isinstance(value, fx.Node) and value not in covered:
            covered = (*covered, value)
        return State(self.captures, covered, self.confined, self.steps + 1)

    def step(self) -> State:
        """Something is matched that does not belong to the match."""
        return State(self.captures, self.covered, self.confined, self.steps + 1)

    def confine(self, *nodes: object) -> State:
        found = tuple(node for node in nodes if isinstance(node, fx.Node))
        return State(self.captures, self.covered, (*self.confined, *found), self.steps)


@dataclass(slots=True)
class Failure:
    """Where an attempt ended and how far it had come, with the reason of each alternative that ended there too."""

    state: State
    value: object
    anchor: int
    reasons: list[str]


class Run:
    """One search in one subject."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.anchor = 0
        self.best: Failure | None = None
        self._activations: dict[fx.Node, str | None] = {}

    def activation(self, node: fx.Node) -> str | None:
        """`activation`, computed once for each node."""
        if node not in self._activations:
            self._activations[node] = activation(node, self.subject)
        return self._activations[node]

    def fail(self, state: State, value: object, reason: str) -> None:
        """Remember the failure of the attempt that came furthest; of equals, that of the latest root."""
        best = self.best
        rank = (state.steps, self.anchor)
        best_rank = (best.state.steps, best.anchor) if best is not None else (-1, -1)
        if best is None or rank > best_rank:
            self.best = Failure(state, value, self.anchor, [reason])
        elif rank == best_rank and reason not in best.reasons and len(best.reasons) < _REASONS:
            best.reasons.append(reason)

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
