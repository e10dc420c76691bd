"""Sizes of a split tensor: a rank reads its own, and what is computed from them must be the rank's own as well.

In: a node that reads a size, or computes with one. Out: whether its number is the rank's own. A size may go into the shape of a view; a
branch on one, or a number computed with one, would be another on a rank.
"""

from __future__ import annotations

from typing import Any

import torch
from fx_match import canonical
from torch import fx

from tf_backend.plan.placement.states import LocalShape, LocalSize, Scene, Shards, Spelled, State, Unplaced


def read_size(scene: Scene, node: fx.Node, source: fx.Node, state: Shards) -> State:
    """``x.shape``, ``x.size()``, ``x.size(axis)`` and ``x.dim()`` of a split tensor `source`."""
    name, ndim = canonical(node), scene.tensor(source).ndim
    value = scene.trace.value(node)
    if name == "dim":
        return None
    if name in {"shape", "size", "getattr"} and isinstance(value, tuple):
        return LocalShape(state.axis, state.pieces)
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if name == "size" and isinstance(axis, int):
        return LocalSize(state.pieces) if axis % ndim == state.axis else None
    raise Unplaced(f"`{node.name}` ({name}) reads a value that would be split over ranks")


def part_of_shape(scene: Scene, node: fx.Node, state: LocalShape) -> State:
    """An entry or a run of a shape."""
    source, key = node.args[0], node.args[1] if len(node.args) > 1 else None
    assert isinstance(source, fx.Node)
    shape = scene.trace.value(source)
    if not isinstance(shape, tuple):
        raise Unplaced(f"the shape of `{source.name}` is not known")
    if canonical(node) == "getitem" and isinstance(key, int):
        return LocalSize(state.pieces) if key % len(shape) == state.axis else None
    if canonical(node) == "getitem" and isinstance(key, slice) and not _has_nodes(key):
        kept = list(range(len(shape)))[key]
        return LocalShape(kept.index(state.axis), state.pieces) if state.axis in kept else None
    raise Unplaced(f"`{node.name}` reads the size of an axis that would be split over ranks")


def arithmetic(scene: Scene, node: fx.Node, state: LocalSize) -> LocalSize:
    """A product with a number, or a quotient that comes out even on a rank too."""
    name, value = canonical(node), scene.trace.value(node)
    other = [operand for operand in node.args if not isinstance(operand, fx.Node) or scene.states[operand] is None]
    if isinstance(value, int) and len(node.args) == 2 and len(other) == 1:
        if name == "mul":
            return state
        divisor = scene.trace.value(other[0]) if isinstance(other[0], fx.Node) else other[0]
        first = scene.trace.value(node.args[0]) if isinstance(node.args[0], fx.Node) else None
        is_even = isinstance(divisor, int) and isinstance(first, int) and divisor and node.args[1] is other[0]
        if name == "floor_div" and is_even and first % (state.pieces * divisor) == 0:  # type: ignore[operator]
            return state
    raise Unplaced(f"`{node.name}` ({name}) computes with the size of an axis that would be split over ranks")


def check_sizes(scene: Scene, node: fx.Node, sizes: list[Any], whole: torch.Size, axis: int, pieces: int) -> None:
    """The sizes that a view is given: entry `axis` follows the data, or is spelled as a number; the others are no rank's own."""
    for position, size in enumerate(sizes):
        state = scene.states.get(size) if isinstance(size, fx.Node) else None
        if position == axis and size != -1 and state != LocalSize(pieces):
            if isinstance(size, fx.Node) or scene.prefix:
                raise Unplaced(
                    f"`{node.name}` takes the size {whole[axis]} of an axis that would be split over ranks from elsewhere"
                )
            scene.found.spelled.append(Spelled(node, position, whole[axis], pieces))
        elif position != axis and state is not None:
            raise Unplaced(f"`{node.name}` takes the size of an axis that would be split over ranks for another axis")


def flat_sizes(node: fx.Node, first: int = 1) -> list[Any]:
    """The sizes given to a view from argument `first` on, whether spread or in one tuple."""
    given = [*node.args[first:]]
    if not given and "size" in node.kwargs:
        given = [node.kwargs["size"]]
    if not given and "shape" in node.kwargs:
        given = [node.kwargs["shape"]]
    return [*given[0]] if len(given) == 1 and isinstance(given[0], tuple | list) else given


def check_branches(scene: Scene) -> None:
    """Refuse a forward whose path hangs on a size: of an axis that is split, or of one that another call has longer or shorter."""
    for guard in scene.trace.guards:
        if guard.kind == "size":
            raise Unplaced(
                f"its path hangs on `{guard.expr}`, a size; it may take another path than the one that was followed"
            )


def _has_nodes(key: slice) -> bool:
    return any(isinstance(end, fx.Node) for end in (key.start, key.stop, key.step))
