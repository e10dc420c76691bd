"""Does an expression have the same value at two places of a function?

The question is answered on the syntax tree alone, so the answer leans to no: a name from an argument, from ``self`` or
from outside may share memory with any other such name, and so may whatever was computed from one.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from ast_rewrite._errors import Refused
from ast_rewrite._names import Path, bound_by, path_of, paths_read
from ast_rewrite._order import COMPREHENSIONS, LOOPS, SCOPES, evaluated, runs_conditionally
from ast_rewrite._render import CurrentTree
from ast_rewrite._source import FunctionSource
from ast_rewrite._span import SourceSpan
from ast_rewrite._writes import Names, Pure, Writes

_DEFERRED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp)


@dataclass(eq=False)
class Flow:
    """Dataflow over the tree as the edits left it.

    Attributes:
        fresh: nodes whose results share memory with nothing and that write to nothing.
        pure: tells of a call that it writes to none of its arguments.
    """

    source: FunctionSource
    current: CurrentTree
    pure: Pure | None = None
    fresh: Collection[ast.AST] = ()
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    order: list[ast.AST] = field(default_factory=list)
    index: dict[ast.AST, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for parent in ast.walk(self.current.tree):
            self.parents.update((child, parent) for child in ast.iter_child_nodes(parent))
        for statement in self.current.tree.body:
            self.order.extend(evaluated(statement))
        self.index = {node: at for at, node in enumerate(self.order)}
        self._names = Names(self.source, self.current.tree)
        self._writes: dict[Path, Writes] = {}
        self._inside_fresh = {inner for node in self.fresh for inner in ast.walk(node)}
        self._deferred = [
            inner
            for scope in ast.walk(self.current.tree)
            if scope is not self.current.tree and isinstance(scope, _DEFERRED)
            for inner in ast.walk(scope)
        ]

    def now(self, node: ast.AST) -> ast.AST:
        """The node that stands for an original one. Raises Refused if an edit took it away."""
        copy = self.current.copies.get(node)
        if copy is None or copy not in self.index:
            span = SourceSpan.of(node) if isinstance(node, ast.expr | ast.stmt) else None
            if copy is not None:
                raise Refused("this lies in a nested function, which runs at another time", span)
            raise Refused("an earlier edit took this expression away", span)
        return copy

    def span(self, node: ast.AST) -> SourceSpan | None:
        """Where a node of the current tree stands in the original; None for text that an edit brought."""
        origin = self.current.origins.get(node, self.current.replaced.get(node))
        return SourceSpan.of(origin) if isinstance(origin, ast.expr | ast.stmt) else None

    def chain(self, node: ast.AST) -> list[ast.AST]:
        """From the function down to the node."""
        found = [node]
        while found[-1] in self.parents:
            found.append(self.parents[found[-1]])
        return found[::-1]

    def require_sequence(self, first: ast.AST, last: ast.AST) -> None:
        """Raises Refused unless `first` was evaluated, in this very pass, whenever `last` is."""
        one, two = self.chain(first), self.chain(last)
        for node in {*one[1:-1], *two[1:-1]}:
            if isinstance(node, SCOPES + COMPREHENSIONS):
                raise Refused(
                    "this lies in a nested function or a comprehension, which runs at another time", self.span(node)
                )
        common = next(
            (at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a is not b), min(len(one), len(two))
        )
        for at in range(common - 1, len(one) - 1):
            parent, child = one[at], one[at + 1]
            if not runs_conditionally(parent, child):
                continue
            if at == common - 1 and common < len(two) and _same_list(parent, child, two[at + 1]):
                continue
            raise Refused(f"this is not always evaluated: it lies in {_described(parent)}", self.span(first))

    def region(self, first: ast.AST | None, last: ast.AST, start: ast.stmt | None = None) -> list[ast.AST]:
        """What is evaluated from `first` (or from the start of the statement `start`) until `last`, loops whole."""
        begin: ast.AST = start if start is not None else first  # type: ignore[assignment]
        low = self.index[next(evaluated(start))] if start is not None else self.index[begin] + 1
        nodes = self.order[low : self.index[last]]
        one = self.chain(begin)[: -1 if start is not None else None]
        two = self.chain(last)
        for mine, others in ((one, two), (two, one)):
            for parent, child in pairwise(mine):
                repeated = isinstance(parent, LOOPS) and not (isinstance(parent, ast.For) and child is parent.iter)
                if repeated and parent not in others:
                    nodes.extend(evaluated(parent))
        return nodes

    def require_unchanged(self, path: Path, nodes: Iterable[ast.AST], *, memory: bool = True) -> None:
        """Raises Refused if evaluating `nodes` may rebind what `path` reads or, unless told otherwise, write to it."""
        if path and path[0] in self._names.outside:
            raise Refused(f"{path[0]} is declared global or nonlocal: other code can rebind it")
        if path not in self._writes:
            self._writes[path] = Writes(self._names, self.current.origins, path, self.pure, self.fresh)
        writes = self._writes[path]
        for node in nodes:
            if node not in self._inside_fresh and (reason := writes.reason(node, memory=memory)):
                raise Refused(f"{'.'.join(path)} may not have the same value: {reason}", self.span(node))
        if not memory:
            return
        for node in self._deferred:  # may run at any time
            if not any(True for _ in bound_by(node)) and (reason := writes.reason(node)):
                raise Refused(f"{'.'.join(path)} may not have the same value: {reason}", self.span(node))

    def require_same_value(self, first: ast.expr, last: ast.expr) -> None:
        """Raises Refused unless everything that two nodes of the current tree read has the same value at both."""
        if self.index[first] > self.index[last]:
            first, last = last, first
        self.require_sequence(first, last)
        nodes = self.region(first, last)
        for path in dict.fromkeys(paths_read(first)):
            self.require_unchanged(path, nodes)


def simple_path(node: ast.expr) -> Path:
    """The path of an input; () for a constant. Raises Refused for anything that is no name, attribute or constant."""
    if isinstance(node, ast.Constant):
        return ()
    path = path_of(node)
    if path is None:
        raise Refused(f"an input must be a name, attributes of a name, or a constant; found {ast.unparse(node)}")
    return path


def _same_list(parent: ast.AST, one: ast.AST, other: ast.AST) -> bool:
    return any(isinstance(value, list) and one in value and other in value for _, value in ast.iter_fields(parent))


def _described(node: ast.AST) -> str:
    names: dict[type[ast.AST], str] = {
        ast.If: "a branch of an if", ast.IfExp: "a conditional expression", ast.BoolOp: "an and/or that can stop early",
        ast.Compare: "a chained comparison", ast.For: "a for loop", ast.While: "a while loop", ast.Try: "a try",
        ast.Match: "a match", ast.Assert: "an assert", ast.AsyncFor: "a for loop",
    }  # fmt: skip
    return names.get(type(node), f"a {type(node).__name__}")
