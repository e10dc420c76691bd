"""Operations on split tensors: entry by entry, over other axes, side by side.

In: an operation and the states of its operands. Out: the state of its result. An operation that is not known here ends the walk.
"""

from __future__ import annotations

from typing import Any

import torch
from fx_match import CASTS, NoSuchArgument, argument, canonical, is_inplace
from torch import fx, nn

from tf_backend.plan.placement import views
from tf_backend.plan.placement.states import OwnShard, Scene, Shards, State, Unplaced

_ELEMENTWISE = frozenset(
    {
        "add", "sub", "mul", "div", "neg", "abs", "pow", "square", "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1", "log",
        "log1p", "sin", "cos", "tanh", "erf", "sigmoid", "logsigmoid", "silu", "gelu", "relu", "relu6", "selu", "elu", "celu",
        "mish", "leaky_relu", "hardtanh", "hardsigmoid", "hardswish", "softplus", "clamp", "where", "maximum", "minimum", "sign",
        "floor", "round", "lerp", "addcmul", "masked_fill", "contiguous", "clone", "detach", "alias", "to", "copy", "fill", "zero",
        "gt", "lt", "ge", "le", "eq", "ne", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not",
        "zeros_like", "ones_like", "empty_like", "full_like", "add_scaled", "sub_scaled", "nan_to_num",
    }
    | CASTS
)  # fmt: skip
"""Each entry of the result depends on the entries of the operands at the same place, and on no other."""

_REDUCTIONS = frozenset({"mean", "sum", "amax", "amin", "var", "std", "logsumexp", "prod", "argmax", "argmin"})
_ALONG = frozenset({"softmax", "log_softmax", "cumsum", "cumprod", "flip", "sort"})
_NORMS = frozenset({"rms_norm", "layer_norm"})
_RESHAPES = frozenset({"reshape", "flatten", "unflatten", "unsqueeze", "squeeze"})
_CUTS = frozenset({"chunk", "split", "tensor_split", "unbind", "narrow", "select"})
FACTORIES = frozenset({"new_empty", "new_zeros", "new_ones", "new_full", "empty", "zeros", "ones", "full"})


def operation(scene: Scene, node: fx.Node) -> State:
    """The state of what an operation gives that takes split tensors."""
    name, value = canonical(node), scene.trace.value(node)
    if is_inplace(node):
        return _written(scene, node, name)
    if name in {"min", "max"} and len(node.all_input_nodes) == 2 and isinstance(value, torch.Tensor):
        name = f"{name}imum"
    if name in _ELEMENTWISE or (name == "dropout" and _given(node, "training", 2) is False):
        return _elementwise(scene, node)
    if name in {"cat", "stack"}:
        return _joined(scene, node, name)
    if name == "expand":
        return views.expand(scene, node, _only(scene, node, name))
    source = _only(scene, node, name)
    state = scene.shards(source)
    assert state is not None
    if name in _RESHAPES:
        return views.reshape(scene, node, source, state)
    if name in {"transpose", "permute"}:
        return views.permute(scene, node, source, state)
    if name == "getitem":
        return views.index(scene, node, source, state)
    if name in _CUTS:
        return views.cut(scene, node, source, state)
    if name == "repeat_interleave":
        return views.repeat_interleave(scene, node, source, state)
    if name in _REDUCTIONS:
        return _reduction(scene, node, name, source, state)
    if name in _ALONG:
        dim = _dims(scene, node, source)
        return _unless_over(dim, node, name, state)
    if name in _NORMS:
        shape = _given(node, "normalized_shape", 1)
        ndim = scene.tensor(source).ndim
        over = range(ndim - len(shape), ndim) if isinstance(shape, tuple | list) else range(ndim)
        return _unless_over(over, node, name, state)
    raise Unplaced(f"`{node.name}` ({name}) takes a value that would be split over ranks")


def _only(scene: Scene, node: fx.Node, name: str) -> fx.Node:
    """The one split operand, which must be the first."""
    sharded = [source for source in node.all_input_nodes if scene.shards(source) is not None]
    first = node.args[0] if node.args else None
    if len(sharded) > 1:
        raise Unplaced(f"`{node.name}` ({name}) combines values that would be split over ranks")
    if not isinstance(first, fx.Node) or (sharded and sharded[0] is not first):
        raise Unplaced(f"`{node.name}` ({name}) takes a value that would be split over ranks")
    return first


def _elementwise(scene: Scene, node: fx.Node) -> State:
    """Operands broadcast against each other from the last axis: what is not split must have one entry along the split axis."""
    value = scene.tensor(node)
    sources = (
        node.all_input_nodes[:1] if canonical(node) in CASTS else node.all_input_nodes
    )  # the other gives its type alone
    sharded = {source: state for source in sources if (state := scene.shards(source)) is not None}
    found = {Shards(value.ndim - scene.tensor(s).ndim + state.axis, state.pieces) for s, state in sharded.items()}
    if len(found) > 1:
        raise Unplaced(f"`{node.name}` combines values that would be split in different ways")
    if not found:
        return None
    (result,) = found
    for source in sources:
        other = scene.trace.value(source)
        if source in sharded or not isinstance(other, torch.Tensor):
            continue
        own = result.axis - (value.ndim - other.ndim)
        if own >= 0 and other.shape[own] != 1 and not _split_parameter(scene, source, Shards(own, result.pieces)):
            raise Unplaced(f"`{node.name}` combines a value that would be split with `{source.name}`, which is whole")
    return result


def _split_parameter(scene: Scene, node: fx.Node, state: Shards) -> bool:
    """Whether a whole operand is a parameter, perhaps cast or shifted, and used for nothing else: then a rank holds its own run of it."""
    chain, current = [node], node
    while current.op != "get_attr":
        name = canonical(current)
        inputs = current.all_input_nodes
        if name not in _ELEMENTWISE or is_inplace(current) or len(inputs) != 1:
            return False
        if scene.tensor(inputs[0]).shape != scene.tensor(node).shape:
            return False
        current = inputs[0]
        chain.append(current)
    path = str(current.target)
    parameter = dict(scene.trace.module.named_parameters()).get(path)
    if not isinstance(parameter, nn.Parameter) or any(len(link.users) != 1 for link in chain):
        return False
    if parameter.shape[state.axis] % state.pieces or "." in path:
        return False
    found, shard = f"{scene.prefix}{path}", OwnShard(state.axis, state.pieces)
    if scene.found.parameters.setdefault(found, shard) != shard:
        raise Unplaced(f"`{found}` would be split in two ways")
    scene.states.update(dict.fromkeys(chain, state))
    return True


def _joined(scene: Scene, node: fx.Node, name: str) -> Shards:
    """Values side by side along another axis; all of them split alike."""
    parts = node.args[0] if node.args else node.kwargs.get("tensors")
    found = {scene.shards(part) for part in parts} if isinstance(parts, tuple | list) else set()
    (state,) = found if len(found) == 1 else (None,)
    if state is None:
        raise Unplaced(f"`{node.name}` ({name}) joins values that would be split with others")
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    if not isinstance(dim, int):
        raise Unplaced(f"`{node.name}` ({name}) joins along an axis that is not known")
    dim %= scene.tensor(node).ndim
    if name == "stack":
        return Shards(state.axis + (dim <= state.axis), state.pieces)
    if dim == state.axis:
        raise Unplaced(f"`{node.name}` (cat) joins along the axis that would be split")
    return state


def _reduction(scene: Scene, node: fx.Node, name: str, source: fx.Node, state: Shards) -> Shards:
    over = _dims(scene, node, source)
    _unless_over(over, node, name, state)
    if _given(node, "keepdim", None) is True:
        return state
    return Shards(state.axis - sum(axis < state.axis for axis in over), state.pieces)


def _unless_over(axes: Any, node: fx.Node, name: str, state: Shards) -> Shards:
    if state.axis in axes:
        raise Unplaced(f"`{node.name}` ({name}) is over the axis that would be split over ranks")
    return state


def _dims(scene: Scene, node: fx.Node, source: fx.Node) -> tuple[int, ...]:
    """Axes over which an operation goes; all where it names none."""
    ndim, dim = scene.tensor(source).ndim, _given(node, "dim", None)
    if dim is None:
        dim = _given(node, "dims", None)
    if dim is None:
        return tuple(range(ndim))
    axes = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(int(axis) % ndim for axis in axes)


def _written(scene: Scene, node: fx.Node, name: str) -> State:
    """A write in place: each rank writes into its own piece what belongs there."""
    target = node.args[0] if node.args else None
    if not isinstance(target, fx.Node) or node.kwargs.get("out") is not None:
        raise Unplaced(f"`{node.name}` ({name}) writes in place to what is not known")
    state = scene.shards(target)
    if state is None:
        raise Unplaced(f"`{node.name}` ({name}) writes in place a value that would be split into one that is whole")
    if name == "setitem":
        raise Unplaced(f"`{node.name}` ({name}) writes in place to parts of a value that would be split over ranks")
    if name not in _ELEMENTWISE or _elementwise(scene, node) != state:
        raise Unplaced(f"`{node.name}` ({name}) writes in place to a value that would be split over ranks")
    return state


def _given(node: fx.Node, name: str, position: int | None) -> Any:
    """An argument by name, however it was passed; by position for functions whose arguments have no names here."""
    try:
        return argument(node, name)
    except NoSuchArgument:
        if name in node.kwargs:
            return node.kwargs[name]
        return node.args[position] if position is not None and len(node.args) > position else None
