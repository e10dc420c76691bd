"""Where a block adds shared experts to what its experts give: `experts(x, ...) + shared(x)`, or `+ sigmoid(gate(x)) * shared(x)`.

In: the trace of a block, the child that holds its experts. Out: a `SharedSite`, or the fact that keeps the shared experts outside of the
runner. Both must be given the same values, reshapes aside, and what the shared experts give must be used for nothing but the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from fx_match import Trace, canonical
from torch import fx, nn

from moe_runner.routers import Place

_ORDER_KEPT = frozenset({"reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous"})
"""Operations that leave rows of one width in their order."""
_OF_SHAPE = frozenset({"shape", "size", "dim", "ndim"})


@dataclass(frozen=True, slots=True)
class SharedSite:
    """One sum of routed and shared experts.

    shared: the call of the shared experts. gate: that of the linear whose sigmoid is a factor on them, if there is one.
    total: the sum; `routed` says which of its operands the experts are. going: what is computed for the sum alone, `total` left out.
    ndim: how many dimensions the shared experts' input has.
    """

    shared: fx.Node
    gate: fx.Node | None
    total: fx.Node
    routed: int
    going: tuple[fx.Node, ...]
    ndim: int


def find_shared(traced: Trace, *, experts: str, hidden: Place) -> SharedSite | str:
    """Shared experts beside the child `experts`, which is called with hidden states at `hidden`; or why the runner cannot have them."""
    try:
        return _find(traced, experts, hidden)
    except _Outside as problem:
        return str(problem)


class _Outside(Exception):
    """Why shared experts stay outside, as a clause."""


def _find(traced: Trace, experts: str, hidden: Place) -> SharedSite:
    if not traced.complete:
        raise _Outside("its block can be followed to a part of its end alone")
    calls = [node for node in traced.graph.nodes if node.op == "call_module" and str(node.target) == experts]
    if len(calls) != 1:
        raise _Outside("its experts are not called once")
    (call,) = calls
    given = call.args[hidden] if isinstance(hidden, int) else call.kwargs.get(hidden)
    if not isinstance(given, fx.Node):
        raise _Outside("its experts are given no tensor")
    width = _width(traced, given)
    last, total = _sum_above(traced, call, width)
    routed = next(at for at, operand in enumerate(total.args) if operand is last)
    other = total.args[1 - routed]
    assert isinstance(other, fx.Node)
    if _form(traced, other) != _form(traced, last) or _form(traced, total) != _form(traced, last):
        raise _Outside("what is added to its experts is of another shape or type than what they give")
    shared, gate, going = _shared(traced, other, total, width)
    source = _origin(traced, given, width, total)
    for node in (shared, gate):
        if node is not None and _origin(traced, _only_input(node), width, total) is not source:
            raise _Outside(f"`{node.target}` is given something else than its experts")
    for node in (call, last, other, *going):
        if set(traced.written_by(node)) - {total}:
            raise _Outside(f"`{node.name}` is written to before the sum")
    beside = _only_input(shared)
    value = None if beside is None else traced.value(beside)
    assert isinstance(value, torch.Tensor)
    if value.ndim not in (2, 3) or (value.ndim == 3 and value.shape[0] != 1):
        raise _Outside(
            f"its shared experts are given {list(value.shape)}, expected [tokens, hidden] or [1, tokens, hidden]"
        )
    return SharedSite(shared, gate, total, routed, going, value.ndim)


def _sum_above(traced: Trace, call: fx.Node, width: int) -> tuple[fx.Node, fx.Node]:
    """What the experts give, reshaped, and the first sum that it goes into."""
    node = call
    while True:
        users = _users(node)
        if len(users) != 1:
            raise _Outside("what its experts give is used for something else before anything is added to it")
        (user,) = users
        if not _keeps_rows(traced, user, node, width):
            break
        node = user
    is_sum = canonical(user) == "add" and len(user.args) == 2 and len(set(user.args)) == 2
    if not is_sum or not all(isinstance(operand, fx.Node) for operand in user.args):
        raise _Outside(
            f"`{user.name}` ({canonical(user)}) is computed of what its experts give before anything is added to it"
        )
    return node, user


def _shared(
    traced: Trace, operand: fx.Node, total: fx.Node, width: int
) -> tuple[fx.Node, fx.Node | None, tuple[fx.Node, ...]]:
    """The call of the shared experts, that of their gate, and all that is computed of them for `total`."""
    chain = list(_back(traced, operand, total, width))
    top = chain[-1]
    if _is_network(traced, top):
        return top, None, tuple(chain)
    if canonical(top) != "mul" or len(top.args) != 2 or not all(isinstance(factor, fx.Node) for factor in top.args):
        raise _Outside(
            f"what is added to its experts is `{top.name}` ({canonical(top)}), and no child with weights gives that"
        )
    for first, second in (top.args, top.args[::-1]):
        assert isinstance(first, fx.Node)
        assert isinstance(second, fx.Node)
        factor = list(_back(traced, first, top, 1))
        if not _is_sigmoid(traced, factor[-1]):
            continue
        factor += _back(traced, _only_input(factor[-1]), factor[-1], 1)
        network = list(_back(traced, second, top, width))
        if not _is_gate(traced, factor[-1]) or not _is_network(traced, network[-1]):
            break
        return network[-1], factor[-1], (*chain, *factor, *network)
    raise _Outside(
        f"its shared experts are multiplied (`{top.name}`) by something that is no sigmoid of a linear with one feature"
    )


def _back(traced: Trace, node: fx.Node | None, user: fx.Node, width: int) -> Iterator[fx.Node]:
    """`node` and what it is a reshape of, each of which has one use."""
    while True:
        if node is None or _users(node) != {user}:
            raise _Outside(
                f"`{node.name if node is not None else user.name}` is used for something else than the sum too"
            )
        yield node
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not _keeps_rows(traced, node, source, width):
            return
        node, user = source, node


def _origin(traced: Trace, node: fx.Node | None, width: int, total: fx.Node) -> fx.Node:
    """What `node` is a reshape of; nothing may write to it on the way."""
    while True:
        if node is None:
            raise _Outside("its shared experts are called with something else than one tensor")
        if set(traced.written_by(node)) - {total}:
            raise _Outside(f"`{node.name}`, which its experts are given, is written to")
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not _keeps_rows(traced, node, source, width):
            return node
        node = source


def _keeps_rows(traced: Trace, node: fx.Node, source: fx.Node, width: int) -> bool:
    """Whether `node` has the rows of `source`, of that width, in their order."""
    if canonical(node) not in _ORDER_KEPT or not node.args or node.args[0] is not source:
        return False
    return _width(traced, node) == width == _width(traced, source)


def _users(node: fx.Node) -> set[fx.Node]:
    return {user for user in node.users if canonical(user) not in _OF_SHAPE}


def _width(traced: Trace, node: fx.Node) -> int:
    value = traced.value(node)
    return int(value.shape[-1]) if isinstance(value, torch.Tensor) and value.ndim else -1


def _form(traced: Trace, node: fx.Node) -> tuple[object, ...] | None:
    value = traced.value(node)
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


def _only_input(node: fx.Node) -> fx.Node | None:
    given = (*node.args, *node.kwargs.values())
    return given[0] if len(given) == 1 and isinstance(given[0], fx.Node) else None


def _child(traced: Trace, node: fx.Node) -> nn.Module | None:
    return traced.module.get_submodule(str(node.target)) if node.op == "call_module" else None


def _is_network(traced: Trace, node: fx.Node) -> bool:
    """A direct child with two matrices or more, which gives what it is given in shape and type."""
    child, given = _child(traced, node), _only_input(node)
    if child is None or given is None or "." in str(node.target):
        return False
    return sum(p.dim() >= 2 for p in child.parameters()) >= 2 and _form(traced, node) == _form(traced, given)


def _is_gate(traced: Trace, node: fx.Node) -> bool:
    child = _child(traced, node)
    return type(child) is nn.Linear and child.out_features == 1 and "." not in str(node.target)


def _is_sigmoid(traced: Trace, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(_child(traced, node)) is nn.Sigmoid
    return canonical(node) == "sigmoid" and _only_input(node) is not None
