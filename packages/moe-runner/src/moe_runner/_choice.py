"""The choice among experts: top-k nodes in the trace of a block, or in the traces of the children that route for it.

In: the dataflow of a traced block and the site of its experts. Out: a `Choice` for each top-k, in the order in which the
forward makes them; whether one of them is the router is decided in `_recognize`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fx_match import FxMatchError, trace
from torch import fx, nn

from moe_runner._block import Score, ScoreOrder
from moe_runner._dataflow import Dataflow, operation
from moe_runner._experts import DEPTH, Site
from moe_runner._spelling import CHOICE_OPS, choices_spelled, undecorated


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One top-k over scores.

    op: name of the operation.
    path: traces from the block inwards, each with its node: the call of a router child, last the top-k itself.
    candidates: length of the dimension that it chooses along.
    count: how many it chooses; None if that was not found.
    by_index: whether which were chosen is used, and not only how much they scored, as for a threshold.
    """

    op: str
    path: tuple[tuple[Dataflow, fx.Node], ...]
    candidates: int
    count: int | None
    by_index: bool
    place: str

    @property
    def node(self) -> fx.Node:
        """The node in the block's own trace."""
        return self.path[0][1]


def choices(flow: Dataflow, site: Site, *, everywhere: bool = False, depth: int = DEPTH) -> Iterator[Choice]:
    """All choices in the trace and in its children's traces, those of the experts' own modules left out.

    everywhere: trace all children, not only those whose code spells a choice (it may be reached through a table or an object).
    """
    for node in flow.trace.graph.nodes:
        if node.op == "call_module":
            if depth and not site.covers(str(node.target)):
                yield from _choices_in_child(flow, node, everywhere, depth)
        elif operation(node) in CHOICE_OPS and (choice := _choice(flow, node)) is not None:
            yield choice


def score_of(choice: Choice, experts: int, stop: set[fx.Node]) -> tuple[Score, ScoreOrder] | tuple[None, None]:
    """The score function before the choice, or the one after it; nodes in `stop` (the experts) are not searched.

    None where there is neither, or both: then no single function says how logits become weights.
    """
    sizes = {experts} | ({choice.count} if choice.count is not None else set())
    before: list[Score] = []
    after: list[Score] = []
    for flow, node in choice.path:
        sources = flow.before(*node.all_input_nodes)
        before += [*flow.scores(sources, {experts}), *_scores_of_children(flow, sources, experts)]
        blocked = stop if flow is choice.path[0][0] else set()
        after += flow.scores(flow.after(node) - blocked - {node}, sizes)
    if len(set(before)) + len(set(after)) != 1:
        return None, None
    return (before[0], "before") if before else (after[0], "after")


def place_of(flow: Dataflow, node: fx.Node) -> str:
    """ "module:line: text" of a node, with the importable name of the module where it is known, never the path of a file."""
    location, traced = flow.trace.location(node), flow.trace
    function = undecorated(traced.module_class.forward)
    module = getattr(function, "__module__", None) or traced.module_class.__module__
    if location.file is not None and location.file != traced.code.co_filename:
        module = inspect.getmodulename(location.file) or module
    return f"{module}:{location.line or '?'}: {location.text}"


def _choices_in_child(flow: Dataflow, node: fx.Node, everywhere: bool, depth: int) -> Iterator[Choice]:
    child = flow.child(node)
    spelled = any(choices_spelled(inner) for inner in child.modules())
    if not spelled and (not everywhere or type(child).__module__.startswith("torch.nn")):
        return
    inner = _traced_child(flow, node, child)
    for choice in choices(inner, _NO_SITE, everywhere=everywhere, depth=depth - 1) if inner is not None else ():
        if inner is not None and inner.returns(choice.node) is not False:
            yield replace(choice, path=((flow, node), *choice.path))


_NO_SITE = Site("", None, "module list", (), (), frozenset())


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


_ARGUMENTS = {"topk": ("input", "k", "dim"), "sort": ("input", "dim"), "argsort": ("input", "dim")}
_PAIRS = {"topk", "sort", "max"}
"""Operations that give (values, indices); the others give indices alone."""


def _choice(flow: Dataflow, node: fx.Node) -> Choice | None:
    op = operation(node)
    arguments: dict[str, Any] = dict(zip(_ARGUMENTS.get(op, ("input", "dim")), node.args, strict=False))
    arguments |= {"input" if name == "self" else name: value for name, value in node.kwargs.items()}
    scores, result = flow.tensor(arguments.get("input")), flow.trace.value(node)
    dim = arguments.get("dim", None if op in ("max", "argmax") else -1)
    if scores is None or not scores.dim() or type(dim) is not int:
        return None
    by_index = op not in _PAIRS or _takes_indices(node)
    if op != "topk" and not by_index:  # a maximum or sorted values: a number among the scores, and no choice
        return None
    count: int | None = 1
    if op == "topk":
        count = int(result[1].shape[dim]) if isinstance(result, tuple) else None
    elif op in ("sort", "argsort"):
        count = None
    return Choice(op, ((flow, node),), scores.shape[dim], count, by_index, place_of(flow, node))


def _takes_indices(node: fx.Node) -> bool:
    """Whether the forward takes the second of (values, indices)."""
    users = [user for user in node.users if operation(user) in ("getitem", "getattr")]
    return any(user.args[1] in (1, "indices") for user in users)
