"""Several projections in one linear: the output is cut apart before anything else is done to it.

In: a node that takes the output of such a linear. Out: the state of what it gives, one part split for itself, or all of them still.
"""

from __future__ import annotations

import torch
from fx_match import canonical
from torch import fx

from tf_backend.plan.placement.states import Packed, Part, Scene, State, Unplaced, shards


def part_of_packed(scene: Scene, node: fx.Node, packed: Packed) -> State:
    """`chunk` and `split` give the parts, an index or a slice of columns takes one; an axis may be added in front of the columns,
    and the columns clamped to numbers."""
    name, value = canonical(node), scene.trace.value(node)
    source = node.args[0]
    if name in {"shape", "size", "dim"} and _reads_other_axes(scene, node):
        return None
    if len(node.all_input_nodes) != 1 or not isinstance(source, fx.Node):
        raise Unplaced(f"`{node.name}` ({name}) takes several projections at once, which would each be split")
    if name in {"chunk", "split"} and isinstance(value, tuple | list):
        widths = [part.shape[-1] if isinstance(part, torch.Tensor) else None for part in value]
        if widths == [part.stop - part.start for part in packed.parts]:
            return packed
    is_kept = name in {"unsqueeze", "contiguous", "clone", "cast", "clamp"} and isinstance(value, torch.Tensor)
    if is_kept and 1 < scene.tensor(node).shape[-1] == scene.tensor(source).shape[-1] == packed.parts[-1].stop:
        return packed
    if name in {"getitem", "slice"} and isinstance(value, torch.Tensor):
        part = _taken(scene, node, source, packed)
        if part is not None:
            return shards(value.ndim - 1, part.pieces)
    raise Unplaced(f"`{node.name}` ({name}) takes other parts of several projections than those that are split")


def _taken(scene: Scene, node: fx.Node, source: fx.Node, packed: Packed) -> Part | None:
    whole, index = scene.trace.value(source), node.args[1] if len(node.args) == 2 else None
    if not isinstance(whole, torch.Tensor):
        return packed.parts[index] if isinstance(index, int) else None
    before = index[:-1] if isinstance(index, tuple) else None
    columns = index[-1] if isinstance(index, tuple) and index else None
    if before is None or any(entry is not Ellipsis and entry != slice(None) for entry in before):
        return None
    if not isinstance(columns, slice) or columns.step not in (None, 1):
        return None
    if not all(isinstance(end, int | None) for end in (columns.start, columns.stop)):
        return None
    if Ellipsis not in before and len(index) != whole.ndim:  # type: ignore[arg-type]
        return None
    start, stop, _ = columns.indices(whole.shape[-1])
    return next((part for part in packed.parts if (part.start, part.stop) == (start, stop)), None)


def _reads_other_axes(scene: Scene, node: fx.Node) -> bool:
    """Whether a read of sizes is used for other axes than the columns."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if canonical(node) == "dim":
        return True
    last = scene.tensor(source).ndim - 1
    axes = [user.args[1] if canonical(user) == "getitem" and len(user.args) > 1 else None for user in node.users]
    if not isinstance(scene.trace.value(node), tuple):
        axes = [node.args[1] if len(node.args) > 1 else None]
    for axis in axes:
        kept = range(last + 1)[axis] if isinstance(axis, int | slice) and _is_plain(axis) else None
        if kept is None or last in (kept if isinstance(kept, range) else (kept,)):
            raise Unplaced(f"`{node.name}` reads the size of an axis that would be split over ranks")
    return True


def _is_plain(axis: int | slice) -> bool:
    return isinstance(axis, int) or all(isinstance(end, int | None) for end in (axis.start, axis.stop, axis.step))
