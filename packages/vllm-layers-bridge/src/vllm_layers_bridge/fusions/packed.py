"""Parts of a packed linear: which of its output features a value is, read from how the forward cuts it up.

In: a node of a trace. Out: the linear, the run of features, and the cut. Cuts along the last axis are read: `chunk`, `split`,
`tensor_split` and slices. What a value is otherwise, such as one row in three of each head, is for the caller to refuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from fx_match import NoSuchArgument, Trace, argument, canonical, is_inplace
from torch import fx, nn

from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions.children import is_any_linear, is_transposed_linear

_CUTS = frozenset({"chunk", "split", "tensor_split", "unsafe_chunk", "unsafe_split"})
_SHAPE_READS = frozenset({"shape", "size"})


@dataclass(frozen=True, slots=True)
class Part:
    """Features `start` to `stop`, of `width` in all, of the output of the packed `linear`; `cut` took them from `source`."""

    linear: fx.Node
    start: int
    stop: int
    width: int
    cut: fx.Node
    source: fx.Node
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The weight of a packed linear of one instance."""

    in_features: int
    out_features: int
    bias: bool
    transposed: bool


def part_of(node: fx.Node, trace: Trace) -> Part | None:
    """What features `node` is; None unless it is one run of the output of one linear, cut along the last axis."""
    if canonical(node) != "getitem" or len(node.args) != 2 or not isinstance(node.args[0], fx.Node):
        return None
    taken_from, key = node.args
    assert isinstance(taken_from, fx.Node)
    if canonical(taken_from) in _CUTS and isinstance(key, int):
        return _of_cut(node, taken_from, key, trace)
    return _of_slice(node, taken_from, key, trace)


def packed_linear(module: nn.Module, node: fx.Node, trace_of: nn.Module) -> PackedLinear:
    """The linear of this instance; NotFusable where it is none, or is not of the sizes that were traced."""
    name = str(node.target)
    try:
        child, traced = module.get_submodule(name), trace_of.get_submodule(name)
    except AttributeError:
        raise NotFusable(f"this instance has no child `{name}`") from None
    if not is_any_linear(child) or not is_any_linear(traced):
        raise NotFusable(f"its `{name}` is a {type(child).__name__} that is no plain linear")
    found, expected = _sizes(child), _sizes(traced)
    if found != expected:
        raise NotFusable(f"its `{name}` is {found} and the one that was traced {expected}")
    return found


def _sizes(child: nn.Module) -> PackedLinear:
    weight, bias = child.weight, child.bias
    assert isinstance(weight, torch.Tensor)
    transposed = is_transposed_linear(child)
    rows, columns = weight.shape
    return PackedLinear(rows if transposed else columns, columns if transposed else rows, bias is not None, transposed)


def keyword_of(linear: fx.Node) -> tuple[fx.Node, str] | None:
    """The node and the reason if a packed linear, whose call stays, is given its input by keyword."""
    if not linear.kwargs:
        return None
    name = next(iter(linear.kwargs))
    return linear, f"`{linear.target}` is given its input as `{name}=`; a layer of the engine takes it by position"


def users_outside(nodes: frozenset[fx.Node], free: frozenset[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """A node of `nodes` and a user of it that lies outside; those of `free` may be used by anything, and a size may be read of any."""
    for node in nodes - free:
        for user in node.users:
            if user not in nodes and canonical(user) not in _SHAPE_READS and not _reads_shape(user):
                return node, user
    return None


def _reads_shape(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is getattr and node.args[1:2] == ("shape",)


def _of_cut(node: fx.Node, cut: fx.Node, index: int, trace: Trace) -> Part | None:
    try:
        source, dim = argument(cut, "input"), argument(cut, "dim")
    except NoSuchArgument:
        return None
    parts = trace.value(cut)
    if not isinstance(source, fx.Node) or not isinstance(parts, tuple | list) or not isinstance(dim, int):
        return None
    if not all(isinstance(part, torch.Tensor) for part in parts) or not -len(parts) <= index < len(parts):
        return None
    rank = parts[0].ndim
    linear = _linear_at(source, trace)
    if linear is None or dim % rank != rank - 1 or not _sizes_known(cut, linear, trace):
        return None
    widths = [int(part.shape[-1]) for part in parts]
    start = sum(widths[: index % len(parts)])
    return Part(linear, start, start + widths[index], sum(widths), cut, source, _between(node, cut, source, linear))


def _of_slice(node: fx.Node, source: fx.Node, key: Any, trace: Trace) -> Part | None:
    linear = _linear_at(source, trace)
    keys = key if isinstance(key, tuple) else (key,)
    value, whole = trace.value(node), trace.value(source)
    if linear is None or not isinstance(value, torch.Tensor) or not isinstance(whole, torch.Tensor):
        return None
    *front, last = keys
    reaches_last = len(keys) == whole.ndim or Ellipsis in front
    if not reaches_last or not isinstance(last, slice) or last.step is not None:
        return None
    if not all((isinstance(given, slice) and given == slice(None)) or given is Ellipsis for given in front):
        return None
    if not _sizes_known(node, linear, trace):
        return None
    bounds = [_number(bound, trace) for bound in (last.start, last.stop)]
    start, stop, _ = slice(*bounds).indices(int(whole.shape[-1]))
    if value.shape[-1] != stop - start:
        return None
    return Part(linear, start, stop, int(whole.shape[-1]), node, source, _between(node, node, source, linear))


def _linear_at(source: fx.Node, trace: Trace) -> fx.Node | None:
    """The linear whose output `source` is, whole and with its features last; `unsqueeze` of another axis, or a clamp, may stand between."""
    node: Any = source
    while isinstance(node, fx.Node) and canonical(node) in ("unsqueeze", "clamp"):
        if canonical(node) == "clamp":  # of each feature by itself, to numbers
            if is_inplace(node) or node.all_input_nodes != [node.args[0]]:
                return None
            node = node.args[0]
            continue
        value = trace.value(node)
        dim = argument(node, "dim")
        if not isinstance(value, torch.Tensor) or not isinstance(dim, int) or dim % value.ndim == value.ndim - 1:
            return None
        node = node.args[0]
    if isinstance(node, fx.Node) and node.op == "call_module":
        return node if is_any_linear(trace.module.get_submodule(str(node.target))) else None
    return None


def _between(node: fx.Node, cut: fx.Node, source: fx.Node, linear: fx.Node) -> tuple[fx.Node, ...]:
    nodes = [node] if node is cut else [node, cut]
    while source is not linear:
        nodes.append(source)
        given = source.args[0]
        assert isinstance(given, fx.Node)
        source = given
    return (*nodes, linear)


def _sizes_known(cut: fx.Node, linear: fx.Node, trace: Trace) -> bool:
    """Whether the places of the cut are facts about the module: constants, or made of the width of the packed output."""
    given = {node for node in cut.all_input_nodes if node is not cut.args[0]}
    seen: set[fx.Node] = set()
    while given:
        node = given.pop()
        if node in seen:
            continue
        seen.add(node)
        if canonical(node) == "getitem" and isinstance(node.args[0], fx.Node) and _is_shape_of(node.args[0], linear):
            value = trace.value(linear)
            index = node.args[1]
            if (
                not isinstance(value, torch.Tensor)
                or not isinstance(index, int)
                or index % value.ndim != value.ndim - 1
            ):
                return False
            continue
        if canonical(node) == "size" and node.args[0] is linear and node.args[1:] in ((-1,),):
            continue
        if not isinstance(trace.value(node), int) or not node.all_input_nodes:
            return False
        given |= set(node.all_input_nodes)
    return True


def _is_shape_of(node: fx.Node, linear: fx.Node) -> bool:
    return _reads_shape(node) and node.args[0] is linear


def _number(bound: Any, trace: Trace) -> int | None:
    value = trace.value(bound) if isinstance(bound, fx.Node) else bound
    return int(value) if isinstance(value, int) else None
