"""Where the router of a block is: the child whose ids and weights go to the experts as they come, and what else is made of it.

In: a block, what it is called with, the child that holds its experts. Out: a `RouterSite`, or the fact that keeps the router where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fx_match import FxMatchError, LeafCall, Trace, trace
from torch import fx, nn

from moe_runner._dataflow import operation
from moe_runner._numbers import bare
from moe_runner._recognize import run_or_pass
from moe_runner.routers import Place


@dataclass(frozen=True, slots=True)
class RouterSite:
    """The router of a block.

    name: of the child. weights, ids: which of the values that it returns these are. logits: which others the block uses.
    given: of its arguments, those that are parameters or buffers of the block, with their names.
    """

    name: str
    weights: int
    ids: int
    logits: tuple[int, ...]
    given: dict[Place, str]


def find_router(
    block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, experts: str, places: tuple[Place, ...]
) -> RouterSite | str:
    """The router of `block`, which calls its child `experts` with hidden states, ids and weights at `places`; or why there is none.

    Whatever the block does is not raised.
    """
    if "forward" in vars(block):
        block = bare(block)
    try:
        traced = trace(block, args, kwargs, leaves=[LeafCall(type(block.get_submodule(experts)), run_or_pass)])
    except FxMatchError as error:
        return f"its block could not be traced: {error}"
    if not traced.complete:
        return "its block can be followed to a part of its end alone"
    calls = [node for node in traced.graph.nodes if node.op == "call_module" and str(node.target) == experts]
    if len(calls) != 1 or len(places) != 3:
        return "its experts are not called once with ids and weights"
    (call,) = calls
    ids, weights = (_argument(call, place) for place in places[1:])
    sources = {_source(node) for node in (ids, weights)}
    source = sources.pop()
    if sources or source is None or not isinstance(ids, fx.Node) or not isinstance(weights, fx.Node):
        return "its block makes ids and weights itself, or changes what its router gives"
    router = str(source.target)
    if sum(str(node.target) == router for node in traced.graph.nodes if node.op == "call_module") != 1:
        return "its block runs its router more than once"
    if any(set(node.users) != {call} or traced.written_by(node) for node in (ids, weights)):
        return "its block uses ids or weights for something else too"
    others = [node for node in source.users if node not in (ids, weights)]
    if any(_index(node) is None for node in others):
        return "its block uses what its router gives as a whole"
    return RouterSite(
        router,
        weights=_place(weights),
        ids=_place(ids),
        logits=tuple(sorted({_place(node) for node in others if node.users})),
        given=_given(source, traced),
    )


def _argument(call: fx.Node, place: Place) -> object:
    return call.args[place] if isinstance(place, int) else call.kwargs[place]


def _source(node: object) -> fx.Node | None:
    """The call of a child of which `node` is one of the values."""
    if not isinstance(node, fx.Node) or _index(node) is None:
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) and source.op == "call_module" else None


def _index(node: fx.Node) -> int | None:
    at = node.args[1] if operation(node) == "getitem" and len(node.args) > 1 else None
    return at if type(at) is int and at >= 0 else None


def _place(node: fx.Node) -> int:
    at = _index(node)
    assert at is not None
    return at


def _given(router: fx.Node, traced: Trace) -> dict[Place, str]:
    given: list[tuple[Place, object]] = [*enumerate(router.args), *router.kwargs.items()]
    return {
        place: str(node.target)
        for place, node in given
        if isinstance(node, fx.Node) and node.op == "get_attr" and not traced.written_by(node)
    }
