"""Looking for a pattern: `find`, `find_all`, `explain`, and what they answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fx_match._canonical import VIEWS, canonical, is_inplace
from fx_match._pattern import Pattern
from fx_match._source import SourceSpan
from fx_match._state import Run, State
from fx_match._subject import Subject, SubjectLike


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """A pattern found.

    root: the node that the pattern as a whole matched. captures: node or constant by name. nodes: all nodes that the pattern
    covers, in the order of the graph; what `any_value` stands for is not covered.
    """

    root: fx.Node
    captures: Mapping[str, Any]
    nodes: tuple[fx.Node, ...]
    subject: Subject = field(repr=False)

    def __getitem__(self, name: str) -> Any:
        return self.captures[name]

    def __contains__(self, name: str) -> bool:
        return name in self.captures

    def get(self, name: str, default: Any = None) -> Any:
        return self.captures.get(name, default)

    @property
    def uncovered(self) -> tuple[fx.Node, ...]:
        """Nodes of the graph that compute something and are not part of the match."""
        return _uncovered(self.subject, set(self.nodes))

    @property
    def is_whole(self) -> bool:
        """Whether the graph is exactly this match: complete, it returns the root and nothing else, all is covered."""
        return whole_reason(self.subject, self.root, set(self.nodes)) is None

    @property
    def spans(self) -> tuple[SourceSpan, ...]:
        """The spans in the forward of the nodes of the match, each once, in order."""
        found = [self.subject.location(node).span for node in self.nodes]
        return tuple(sorted({span for span in found if span is not None}))


@dataclass(frozen=True, slots=True, eq=False)
class Miss:
    """A pattern not found, and the nearest attempt: the one that matched most of the pattern.

    node: where it failed, None if that is no node. captures, nodes: how far it had come. Always false in a condition.
    """

    reason: str
    node: fx.Node | None
    captures: Mapping[str, Any]
    nodes: tuple[fx.Node, ...]
    subject: Subject = field(repr=False)

    def __bool__(self) -> bool:
        return False

    @property
    def depth(self) -> int:
        """How many nodes the nearest attempt covered."""
        return len(self.nodes)

    @property
    def span(self) -> SourceSpan | None:
        return self.subject.location(self.node).span if self.node is not None else None

    @property
    def line(self) -> str:
        """`file:line` of the node where the nearest attempt failed; empty if not known."""
        if self.node is None or self.subject.location(self.node).file is None:
            return ""
        return str(self.subject.location(self.node))

    def __str__(self) -> str:
        return f"{self.line}: {self.reason}" if self.line else self.reason


def find(pattern: Pattern, subject: SubjectLike) -> Match | Miss:
    """The first match in the order of the graph, or the nearest miss."""
    run = Run(Subject.of(subject))
    return next(_matches(pattern, run), None) or _miss(run)


def find_all(pattern: Pattern, subject: SubjectLike) -> list[Match]:
    """All matches that share no covered node, in the order of the graph; stored tensors may be shared."""
    run = Run(Subject.of(subject))
    taken: set[fx.Node] = set()
    found = []
    for match in _matches(pattern, run):
        own = {node for node in match.nodes if node.op not in ("placeholder", "get_attr")}
        if not own & taken:
            taken |= own
            found.append(match)
    return found


def match_at(pattern: Pattern, node: fx.Node, subject: SubjectLike) -> Match | Miss:
    """The match whose root is `node`, or the nearest miss there."""
    run = Run(Subject.of(subject))
    return next(_matches_at(pattern, node, run), None) or _miss(run)


def _matches(pattern: Pattern, run: Run) -> Iterator[Match]:
    for node in run.subject.graph.nodes:
        if node.op != "output":
            first = next(_matches_at(pattern, node, run), None)
            if first is not None:
                yield first


def _matches_at(pattern: Pattern, node: fx.Node, run: Run) -> Iterator[Match]:
    run.anchor = run.subject.order[node]
    for state in pattern.match(node, State(), run):
        problem = _problem(node, state, run.subject)
        if problem is not None:
            run.fail(state, *problem)
            continue
        order = run.subject.order
        nodes = tuple(sorted(state.covered, key=order.__getitem__))
        yield Match(node, dict(state.captures), nodes, run.subject)


def _miss(run: Run) -> Miss:
    if run.best is None:
        return Miss("the graph is empty", None, {}, (), run.subject)
    best = run.best
    nodes = tuple(sorted(best.state.covered, key=run.subject.order.__getitem__))
    node = best.value if isinstance(best.value, fx.Node) else (nodes[0] if nodes else None)
    return Miss("; or ".join(best.reasons), node, dict(best.state.captures), nodes, run.subject)


def _problem(root: fx.Node, state: State, subject: Subject) -> tuple[fx.Node, str] | None:
    """What is wrong with a state that fits the pattern: a value that escapes, or is written in place."""
    covered = set(state.covered)
    for node in state.confined:
        outside = [user for user in node.users if user not in covered]
        if outside:
            return node, f"value escapes: {node.name} is also used by {', '.join(user.name for user in outside)}"
        if not subject.complete:
            return node, f"the trace is partial: later uses of {node.name} are not known"
    for node in (*covered, *(value for value in state.captures.values() if isinstance(value, fx.Node))):
        writers = [writer for writer in subject.written_by(node) if writer not in covered]
        if writers:
            return node, f"{node.name} is written in place by {', '.join(writer.name for writer in writers)}"
    for node in covered:
        if is_inplace(node) and (reason := _outward_write(node, covered)) is not None:
            return node, reason
    return None


def _outward_write(node: fx.Node, covered: set[fx.Node]) -> str | None:
    """An operation in place is pure only towards a value made in the match, whose users are all in it."""
    target: Any = node.kwargs.get("out", node.args[0] if node.args else None)
    while isinstance(target, fx.Node):
        if target not in covered or target.op in ("placeholder", "get_attr"):
            return f"{node.name} writes in place into {target.name}, which lives on outside"
        outside = [user for user in target.users if user not in covered]
        if outside:
            return f"{node.name} writes in place into {target.name}, also used by {outside[0].name}"
        if canonical(target) not in VIEWS and not is_inplace(target):
            return None
        target = target.args[0] if target.args else None
    return f"{node.name} writes in place into something unknown"


_SHAPE_READS = frozenset({"shape", "size", "numel", "nelement"})


def _uncovered(subject: Subject, covered: set[fx.Node]) -> tuple[fx.Node, ...]:
    return tuple(
        node
        for node in subject.graph.nodes
        if node not in covered and node.op not in ("placeholder", "output") and not _is_idle(node)
    )


def _is_idle(node: fx.Node) -> bool:
    """A stored tensor or the read of a shape that leads nowhere: it computes nothing."""
    if node.op == "get_attr" or canonical(node) in _SHAPE_READS:
        return all(_is_idle(user) for user in node.users)
    whole = node.args[0] if node.args else None
    is_entry = canonical(node) == "getitem" and isinstance(whole, fx.Node) and canonical(whole) in _SHAPE_READS
    return is_entry and not node.users


def returned(subject: Subject) -> Any:
    """What the graph returns; out of a tuple of one, as torch.export and dynamo return. None on a partial trace."""
    output = next((node for node in reversed(subject.graph.nodes) if node.op == "output"), None)
    value = output.args[0] if output is not None else None
    return value[0] if isinstance(value, (tuple, list)) and len(value) == 1 else value


def whole_reason(subject: Subject, root: fx.Node, covered: set[fx.Node]) -> tuple[fx.Node, str] | None:
    """Why the graph is not exactly the match with this root."""
    if not subject.complete:
        return root, "the trace is partial: what follows is not known"
    if returned(subject) is not root:
        return root, f"{root.name} is not what the forward returns"
    left = _uncovered(subject, covered)
    return (left[0], f"{left[0].name} is not covered by the pattern") if left else None
