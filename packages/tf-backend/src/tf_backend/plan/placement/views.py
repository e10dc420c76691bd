"""Views of a split tensor: which axis is split afterwards.

In: a node that rearranges, slices or repeats entries, and the state of what it takes. Out: the state of what it gives. A rank's piece of
the view must be the view of the rank's piece; where that is not so, or not known, Unplaced.
"""

from __future__ import annotations

from typing import Any

import torch
from fx_match import NoSuchArgument, argument, canonical
from torch import fx

from tf_backend.plan.placement.sizes import check_sizes, flat_sizes
from tf_backend.plan.placement.states import LocalShape, LocalSize, Scene, Shards, State, Unplaced


def reshape(scene: Scene, node: fx.Node, source: fx.Node, state: Shards) -> Shards:
    """The split axis keeps its place in memory: it is the first of the axes that it becomes part of, or becomes."""
    old, new = scene.tensor(source).shape, scene.tensor(node).shape
    before, axis, seen = _product(old[: state.axis]), 0, 1
    while axis < len(new) and seen < before:
        seen *= new[axis]
        axis += 1
    while axis < len(new) and new[axis] == 1:
        axis += 1
    if seen != before or axis >= len(new) or new[axis] % state.pieces:
        raise Unplaced(f"`{node.name}` reshapes the axis that would be split in a way that does not keep its parts")
    name = canonical(node)
    if name == "reshape":
        sizes = flat_sizes(node)
        if len(sizes) == 1 and isinstance(sizes[0], fx.Node) and isinstance(scene.trace.value(sizes[0]), tuple):
            if scene.states[sizes[0]] != LocalShape(axis, state.pieces):
                raise Unplaced(
                    f"`{node.name}` takes a shape from elsewhere, with the size of an axis that would be split"
                )
        elif len(sizes) != len(new):
            raise Unplaced(f"`{node.name}` reshapes a value that would be split to sizes that are not known")
        else:
            check_sizes(scene, node, sizes, new, axis, state.pieces)
    elif name == "unflatten":
        dim, sizes = _of(node, "dim"), _of(node, "sizes")
        if not isinstance(dim, int) or not isinstance(sizes, tuple | list):
            raise Unplaced(f"`{node.name}` reshapes a value that would be split to sizes that are not known")
        dim %= len(old)
        spelled = [None] * dim + [*sizes] + [None] * (len(old) - dim - 1)
        if dim <= axis < dim + len(sizes):
            check_sizes(scene, node, spelled, new, axis, state.pieces)
    return Shards(axis, state.pieces)


def permute(scene: Scene, node: fx.Node, source: fx.Node, state: Shards) -> Shards:
    """`transpose` of two axes, `permute` of all."""
    ndim = scene.tensor(source).ndim
    if canonical(node) == "transpose":
        given = [*node.args[1:], *node.kwargs.values()]
        pair = [axis % ndim for axis in given if isinstance(axis, int)]
        if len(pair) != 2 or len(given) != 2:
            raise Unplaced(f"`{node.name}` swaps axes that are not known")
        return Shards({pair[0]: pair[1], pair[1]: pair[0]}.get(state.axis, state.axis), state.pieces)
    order = _of(node, "dim")
    if not isinstance(order, tuple | list) or not all(isinstance(axis, int) for axis in order):
        raise Unplaced(f"`{node.name}` permutes axes in an order that is not known")
    return Shards([int(axis) % ndim for axis in order].index(state.axis), state.pieces)


def index(scene: Scene, node: fx.Node, source: fx.Node, state: Shards) -> Shards:
    """``x[...]`` with numbers, slices, None and an ellipsis; the split axis is taken whole."""
    key = node.args[1]
    return Shards(indexed_axis(scene, node, key, scene.tensor(source).ndim, state.axis), state.pieces)


def indexed_axis(scene: Scene, node: fx.Node, key: Any, ndim: int, axis: int) -> int:
    """Where `axis` of a tensor of `ndim` axes is in ``x[key]``."""
    entries = list(key) if isinstance(key, tuple) else [key]
    taken = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if Ellipsis not in [entry for entry in entries if not isinstance(entry, fx.Node)]:
        entries.append(Ellipsis)
    source, result = 0, 0
    for entry in entries:
        if entry is None:
            result += 1
        elif entry is Ellipsis:
            kept = ndim - taken
            if source <= axis < source + kept:
                return result + axis - source
            source, result = source + kept, result + kept
        elif isinstance(entry, int | slice) and not isinstance(entry, bool):
            if source == axis:
                if entry != slice(None):
                    raise Unplaced(
                        f"`{node.name}` takes parts of a value along the axis that would be split over ranks"
                    )
                return result
            if isinstance(entry, slice) and _has_local_ends(scene, entry):
                raise Unplaced(f"`{node.name}` cuts at the size of an axis that would be split over ranks")
            source, result = source + 1, result + isinstance(entry, slice)
        else:
            raise Unplaced(f"`{node.name}` takes parts of a value that would be split by what is computed")
    raise Unplaced(f"`{node.name}` takes parts of a value along the axis that would be split over ranks")


def cut(scene: Scene, node: fx.Node, source: fx.Node, state: Shards) -> Shards:
    """`chunk`, `split`, `unbind`, `narrow`, `select`: along another axis than the split one."""
    name, dim, ndim = canonical(node), _of(node, "dim"), scene.tensor(source).ndim
    if not isinstance(dim, int):
        raise Unplaced(f"`{node.name}` ({name}) takes parts along an axis that is not known")
    dim %= ndim
    if dim == state.axis:
        raise Unplaced(f"`{node.name}` ({name}) takes parts of a value along the axis that would be split over ranks")
    gone = name in {"unbind", "select"} and dim < state.axis
    return Shards(state.axis - gone, state.pieces)


def expand(scene: Scene, node: fx.Node, source: fx.Node) -> State:
    """Repeats entries of axes of length 1: of a whole value as often as a rank has heads, or of a split one along other axes."""
    old, new = scene.tensor(source).shape, scene.tensor(node).shape
    sizes, state = flat_sizes(node), scene.shards(source)
    if len(sizes) == 1 and isinstance(sizes[0], fx.Node):
        shape = scene.states[sizes[0]]
        local = {shape.axis: shape.pieces} if isinstance(shape, LocalShape) else {}
        known = len(new) if isinstance(scene.trace.value(sizes[0]), tuple) else 1
    else:
        found = {at: scene.states[size] for at, size in enumerate(sizes) if isinstance(size, fx.Node)}
        local = {at: size.pieces for at, size in found.items() if isinstance(size, LocalSize)}
        known = len(sizes)
    shift = len(new) - len(old)
    if known != len(new) or len(local) > 1:
        raise Unplaced(f"`{node.name}` repeats a value to sizes that are not known")
    if state is None:
        if not local:
            return None
        ((axis, pieces),) = local.items()
        if axis >= shift and old[axis - shift] != 1:
            raise Unplaced(f"`{node.name}` repeats a whole value to the size of one that would be split")
        return Shards(axis, pieces)
    axis = state.axis + shift
    if local and local != {axis: state.pieces}:
        raise Unplaced(f"`{node.name}` repeats a value that would be split along another axis to the size of that one")
    if not local:
        if len(sizes) != len(new):
            raise Unplaced(f"`{node.name}` takes a shape from elsewhere, with the size of an axis that would be split")
        check_sizes(scene, node, sizes, new, axis, state.pieces)
    return Shards(axis, state.pieces)


def repeat_interleave(scene: Scene, node: fx.Node, source: fx.Node, state: Shards) -> Shards:
    """Each entry a number of times, beside itself: as many on a rank."""
    repeats, dim = _of(node, "repeats"), _of(node, "dim")
    if not isinstance(repeats, int) or not isinstance(dim, int):
        raise Unplaced(f"`{node.name}` repeats a value that would be split in a way that is not known")
    return state


def factory(scene: Scene, node: fx.Node) -> State:
    """``x.new_empty(sizes)`` and its kin: all entries alike, or none yet; split where a size is a rank's own."""
    name = canonical(node)
    first = 1 if name.startswith("new_") else 0
    sizes = flat_sizes(node, first)
    if name.endswith("full") and len(node.args) > first and isinstance(node.args[first], tuple | list):
        sizes = [*node.args[first]]  # type: ignore[misc]
    if len(sizes) == 1 and isinstance(sizes[0], fx.Node) and isinstance(scene.states[sizes[0]], LocalShape):
        shape = scene.states[sizes[0]]
        assert isinstance(shape, LocalShape)
        return Shards(shape.axis, shape.pieces)
    local = [
        (at, state)
        for at, size in enumerate(sizes)
        if isinstance(size, fx.Node) and isinstance(state := scene.states[size], LocalSize)
    ]
    if len(local) > 1:
        raise Unplaced(f"`{node.name}` makes a value that would be split along two axes")
    return Shards(local[0][0], local[0][1].pieces) if local else None


def _of(node: fx.Node, name: str) -> Any:
    try:
        return argument(node, name)
    except NoSuchArgument:
        return None


def _has_local_ends(scene: Scene, entry: slice) -> bool:
    ends = (entry.start, entry.stop, entry.step)
    return any(isinstance(end, fx.Node) and scene.states.get(end) is not None for end in ends)


def _product(sizes: torch.Size) -> int:
    total = 1
    for size in sizes:
        total *= int(size)
    return total
