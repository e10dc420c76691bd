"""The choice among experts: top-k nodes in the trace of a block, or in the traces of the children that route for it.

In: the dataflow of a traced block and the site of its experts. Out: a `Choice` for each top-k, in the order in which the
forward makes them; whether one of them is the router is decided in `_recognize`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from fx_match import FxMatchError, trace
from torch import fx, nn

from moe_runner._block import Score, ScoreOrder
from moe_runner._dataflow import Dataflow, operation
from moe_runner._experts import DEPTH, Site
from moe_runner._spelling import CHOICE_OPS, choices_spelled


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One top-k over scores.

    path: traces from the block inwards, each with its node: the call of a router child, last the top-k itself.
    candidates: length of the dimension that it chooses along.
    count: how many it chooses; None if that was not found.
    """

    path: tuple[tuple[Dataflow, fx.Node], ...]
    candidates: int
    count: int | None
    place: str

    @property
    def node(self) -> fx.Node:
        """The node in the block's own trace."""
        return self.path[0][1]


def choices(flow: Dataflow, site: Site, depth: int = DEPTH) -> Iterator[Choice]:
    """All choices in the trace and in its children's traces, those of the experts' own modules left out."""
    for node in flow.trace.graph.nodes:
        if node.op == "call_module":
            if depth and not site.covers(str(node.target)):
                yield from _choices_in_child(flow, node, depth)
        elif operation(node) in CHOICE_OPS and (choice := _choice(flow, node)) is not None:
            yield choice


def score_of(choice: Choice, experts: int, stop: set[fx.Node]) -> tuple[Score, ScoreOrder] | tuple[None, None]:
    """The score function before the choice, else the one after it; nodes in `stop` (the experts) are not searched."""
    flow, node = choice.path[-1]
    sources = flow.before(*node.all_input_nodes)
    before = [*flow.scores(sources, {experts}), *_scores_of_children(flow, sources, experts)]
    if before:
        return before[-1], "before"
    sizes = {experts} | ({choice.count} if choice.count is not None else set())
    for flow, node in reversed(choice.path):
        blocked = stop if flow is choice.path[0][0] else set()
        after = next(flow.scores(flow.after(node) - blocked, sizes), None)
        if after is not None:
            return after, "after"
    return None, None


def place_of(flow: Dataflow, node: fx.Node) -> str:
    """ "module:line: text" of a node, with the importable name of the module, not the path of its file."""
    location = flow.trace.location(node)
    function: Any = getattr(flow.trace.module_class, "forward", None)
    module = getattr(function, "__module__", None) or flow.trace.module_class.__module__
    return f"{module}:{location.line or '?'}: {location.text}"


def _choices_in_child(flow: Dataflow, node: fx.Node, depth: int) -> Iterator[Choice]:
    child = flow.child(node)
    if not any(choices_spelled(inner) for inner in child.modules()):
        return
    inner = _traced_child(flow, node, child)
    for choice in choices(inner, _NO_SITE, depth - 1) if inner is not None else ():
        yield Choice(((flow, node), *choice.path), choice.candidates, choice.count, choice.place)


_NO_SITE = Site("", None, "module list", (), (), 0)


def _traced_child(flow: Dataflow, node: fx.Node, child: nn.Module) -> Dataflow | None:
    values = flow.call_values(node)
    if values is None:
        return None
    try:
        return Dataflow(trace(child, *values))
    except FxMatchError:
        return None


def _scores_of_children(flow: Dataflow, nodes: set[fx.Node], experts: int) -> Iterator[Score]:
    """Score functions inside a child that gives the scores: the choice is made on what it returns."""
    for node in flow.trace.graph.nodes:
        if node in nodes and node.op == "call_module" and flow.last_size(node) == experts:
            child = flow.child(node)
            inner = None if type(child).__module__.startswith("torch.nn") else _traced_child(flow, node, child)
            if inner is not None:
                yield from inner.scores(inner.trace.graph.nodes, {experts})


def _choice(flow: Dataflow, node: fx.Node) -> Choice | None:
    arguments: dict[str, Any] = dict(zip(("input", "k", "dim"), node.args, strict=False)) | dict(node.kwargs)
    if operation(node) == "argmax":
        arguments = dict(zip(("input", "dim"), node.args, strict=False)) | dict(node.kwargs)
    scores = flow.tensor(arguments.get("input", arguments.get("self")))
    dim = arguments.get("dim", -1)
    if scores is None or not scores.dim() or not isinstance(dim, int):
        return None
    count = 1 if operation(node) == "argmax" else _count(flow, node, arguments.get("k"), dim)
    return Choice(((flow, node),), scores.shape[dim], count, place_of(flow, node))


def _count(flow: Dataflow, node: fx.Node, k: object, dim: int) -> int | None:
    result = flow.trace.value(node)
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], torch.Tensor):
        return int(result[1].shape[dim])
    return k if type(k) is int else None
