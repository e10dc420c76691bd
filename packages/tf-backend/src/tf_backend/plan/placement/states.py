"""How one value of a graph lies over ranks, and what a walk finds out about a module.

In: nothing. Out: data. A value without a state is whole: the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from fx_match import Trace
from torch import fx


@dataclass(frozen=True, slots=True)
class Shards:
    """A tensor cut along `axis`, counted from the front, into `pieces` equal runs; rank r of R holds run ``r * pieces // R``.

    Fewer pieces than ranks: key and value heads that ranks outnumber, each of them held by several.
    """

    axis: int
    pieces: int


@dataclass(frozen=True, slots=True)
class Part:
    """Columns `start` to `stop` of the output of a linear that holds several projections, cut into `pieces` for themselves."""

    start: int
    stop: int
    pieces: int


@dataclass(frozen=True, slots=True)
class Packed:
    """The output of a linear that holds several projections, along the last axis."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class LocalShape:
    """A shape whose entry `axis` is that of one rank."""

    axis: int
    pieces: int


@dataclass(frozen=True, slots=True)
class LocalSize:
    """A number that is `pieces` times smaller on a rank than in the whole."""

    pieces: int


State: TypeAlias = Shards | Packed | LocalShape | LocalSize | None


class Unplaced(Exception):
    """Why a module cannot be split, in a sentence."""


@dataclass(frozen=True, slots=True)
class Spelled:
    """Entry `position` of the sizes given to `node`: the forward gives the number `whole`, and a rank needs ``whole / pieces``."""

    node: fx.Node
    position: int
    whole: int
    pieces: int


@dataclass(frozen=True, slots=True)
class OwnShard:
    """A parameter of the module, or of a child of it, of which a rank holds one of `pieces` runs along `axis`."""

    axis: int
    pieces: int


@dataclass(frozen=True, slots=True)
class Styles:
    """How a module is split, by names of its children.

    column, row, whole: linears split on outputs, on inputs, or not at all.
    pieces: for each linear split on outputs that no merged layer takes, into how many pieces.
    norms: norms whose mean is taken over ranks, with the number of pieces.
    parameters: its own, and those of its children by path, of which a rank holds a run.
    spelled: sizes that the forward gives as numbers and that are smaller on a rank.
    """

    column: frozenset[str]
    row: frozenset[str]
    whole: frozenset[str]
    pieces: dict[str, int]
    norms: dict[str, int]
    parameters: dict[str, OwnShard]
    spelled: tuple[Spelled, ...]
    states: dict[fx.Node, State]


@dataclass(slots=True)
class Found:
    """What a walk has found so far."""

    column: set[str] = field(default_factory=set)
    row: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    pieces: dict[str, int] = field(default_factory=dict)
    norms: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, OwnShard] = field(default_factory=dict)
    spelled: list[Spelled] = field(default_factory=list)
    attention_calls: int = 0


@dataclass(slots=True)
class Scene:
    """The graph of one forward while it is walked through.

    prefix: path of the module below the one that is split, with a dot behind it; empty for that one itself.
    """

    trace: Trace
    ranks: int
    found: Found
    prefix: str = ""
    states: dict[fx.Node, State] = field(default_factory=dict)

    def tensor(self, node: fx.Node) -> torch.Tensor:
        """The value of `node`, or the first of several; Unplaced where its shape is not known."""
        value = self.trace.value(node)
        if isinstance(value, tuple | list) and value and isinstance(value[0], torch.Tensor):
            value = value[0]
        if not isinstance(value, torch.Tensor):
            raise Unplaced(f"the shape of `{node.name}` is not known")
        return value

    def shards(self, node: Any) -> Shards | None:
        """The state of `node` if it is a tensor that is cut."""
        state = self.states.get(node) if isinstance(node, fx.Node) else None
        return state if isinstance(state, Shards) else None


def shards(axis: int, pieces: int) -> Shards | None:
    """The state of a tensor in that many pieces: one piece is the whole."""
    return Shards(axis, pieces) if pieces > 1 else None
