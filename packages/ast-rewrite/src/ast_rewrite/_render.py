"""Edits applied to a function twice: to its text, and to its tree.

The text is what is kept; the tree is what was meant. A patch is sound if the text parses to the tree.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ast_rewrite._edit import Edit
from ast_rewrite._files import FunctionNode
from ast_rewrite._layout import indentation, reindent
from ast_rewrite._order import SHARED
from ast_rewrite._quiet import parse_quietly
from ast_rewrite._source import FunctionSource, statement_span
from ast_rewrite._span import SourceSpan
from ast_rewrite._template import Template, same_tree

_NOW = math.inf


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """An edit with what it lands on: a node of the original tree, its bytes in the text, its parsed template."""

    order: int
    edit: Edit
    node: ast.expr | ast.stmt
    low: int
    high: int
    template: Template
    holes: tuple[ast.expr, ...]  # one for each placeholder, in order of appearance

    def carries(self, low: int, high: int, source: FunctionSource) -> bool:
        """True if a placeholder inside the replaced range holds these bytes, so that edits of them live on."""
        return any(
            a <= low and high <= b and self.low <= a and b <= self.high
            for a, b in (byte_range(source, hole) for hole in self.holes)
        )


def byte_range(source: FunctionSource, node: ast.expr | ast.stmt) -> tuple[int, int]:
    """The bytes of a node of the original tree in ``source.text``; of a statement, with its decorators."""
    span = statement_span(node) if isinstance(node, ast.stmt) else SourceSpan.of(node)
    return source.offset(*span.start), source.offset(*span.end)


def place(source: FunctionSource, edit: Edit, order: int) -> Placed:
    """Find what an edit lands on. Raises Refused where that is nothing, or nothing that can be edited."""
    node: ast.expr | ast.stmt
    if edit.kind == "replace":
        node = source.read_at(edit.span)
    else:
        node = source.statement_at(edit.span)
    holes = dict(edit.holes)
    template = Template.parse(edit.text, "eval" if edit.kind == "replace" else "exec")
    if missing := sorted(set(template.names) - set(holes)):
        raise ValueError(f"no span was given for placeholder {missing[0]!r} of {edit.text!r}")
    nodes = tuple(source.read_at(holes[name]) for name in template.names)
    return Placed(order, edit, node, *byte_range(source, node), template, nodes)


class _Change(NamedTuple):
    low: int
    high: int
    text: Callable[[], str]


@dataclass(frozen=True, slots=True, eq=False)
class CurrentTree:
    """The tree after the edits.

    Attributes:
        copies: from an original node to the one that stands in its place now.
        origins: from a copied node to the original; nodes that an edit brought are not in it.
        replaced: from the expression that an edit brought to the original expression in whose place it stands.
    """

    tree: FunctionNode
    copies: dict[ast.AST, ast.AST]
    origins: dict[ast.AST, ast.AST]
    replaced: dict[ast.AST, ast.AST]


@dataclass(eq=False)
class Rendering:
    """The text and the tree of a function under a list of edits."""

    source: FunctionSource
    placed: Sequence[Placed]
    emitted: list[tuple[int, int]] = field(default_factory=list)  # original bytes, each time they are put in the text

    def text(self) -> str:
        """The whole definition, indented as in the file."""
        self.emitted.clear()
        return self._range(0, len(self.source.text.encode()), _NOW, _NOW, statements=True)

    def range_text(self, span: SourceSpan) -> str:
        """The text of a span with the edits inside it; edits of statements are not among them."""
        return self._range(self.source.offset(*span.start), self.source.offset(*span.end), _NOW, _NOW)

    def current(self, *, with_deleted: bool = False) -> CurrentTree:
        """The tree that the text must parse to; with the deleted statements still in it, if asked."""
        builder = _Builder(self, with_deleted)
        return CurrentTree(builder.function(), builder.copies, builder.origins, builder.replaced)

    def expression_tree(self, node: ast.expr) -> ast.expr:
        """What an expression of the original has become."""
        return _Builder(self).expression(node, _NOW, _NOW)

    def problem(self) -> str | None:
        """Why the text is not what was meant; None if it is."""
        text = self.text()
        source = "class _:\n" + text if indentation(text) else text
        try:
            parsed = parse_quietly(source, self.source.filename).body[0]
        except SyntaxError as error:
            return f"the edited text does not parse: {error.msg}: {(error.text or '').strip()!r}"
        found = parsed.body[0] if isinstance(parsed, ast.ClassDef) else parsed
        assert isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef)
        found.decorator_list = self.source.tree.decorator_list
        if not same_tree([found], [self.current().tree]):
            return "the edited text parses to something else than what was meant"
        return None

    def replacement(self, node: ast.expr, before: float, below: float) -> Placed | None:
        """The last edit of this very expression that is older than both limits."""
        found = [p for p in self.placed if p.edit.kind == "replace" and p.node is node and p.order < min(before, below)]
        return found[-1] if found else None

    def limits(self, placed: Placed, hole: ast.expr, before: float) -> tuple[float, float]:
        """Which edits the text in a placeholder shows.

        Inside the replaced expression that text lives on, later edits and all; from elsewhere it is a copy of what stood
        there when the edit was made.
        """
        low, high = byte_range(self.source, hole)
        if placed.edit.kind == "replace" and placed.low <= low and high <= placed.high:
            return before, placed.order if hole is placed.node else _NOW
        return min(before, placed.order), _NOW

    def inserted_before(self, statement: ast.stmt) -> list[Placed]:
        return [p for p in self.placed if p.edit.kind == "insert" and p.node is statement]

    def is_deleted(self, statement: ast.stmt) -> bool:
        return any(p.edit.kind == "delete" and p.node is statement for p in self.placed)

    def leaves_pass(self, statement: ast.stmt) -> bool:
        """True if ``pass`` stands where this deleted statement was."""
        return any(
            self._deletion(p)[2] == "pass" for p in self.placed if p.edit.kind == "delete" and p.node is statement
        )

    def _range(self, low: int, high: int, before: float, below: float, *, statements: bool = False) -> str:
        data = self.source.text.encode()
        out: list[str] = []
        at = low
        for start, end, text in self._changes(low, high, before, below, statements=statements):
            if start < at:
                continue  # inside an outer edit
            self.emitted.append((at, start))
            out += [data[at:start].decode(), text()]
            at = end
        self.emitted.append((at, high))
        return "".join(out) + data[at:high].decode()

    def _changes(self, low: int, high: int, before: float, below: float, *, statements: bool) -> list[_Change]:
        """What happens to these bytes, outer changes before inner ones that start at the same place."""
        found: list[tuple[tuple[int, int, int, int], _Change]] = []
        for placed in self.placed:
            if placed.order >= before:
                continue
            if placed.edit.kind == "replace":
                whole = (placed.low, placed.high) == (low, high)
                if low <= placed.low and placed.high <= high and not (whole and placed.order >= below):
                    change = _Change(placed.low, placed.high, partial(self._filled, placed, before))
                    found.append(((placed.low, 1, -placed.high, -placed.order), change))
            elif statements and placed.edit.kind == "insert":
                point = self._insertion_point(placed)
                found.append(((point, 0, 0, placed.order), _Change(point, point, partial(self._inserted, placed))))
            elif statements:
                start, end, text = self._deletion(placed)
                found.append(((start, 1, -end, -placed.order), _Change(start, end, partial(str, text))))
        return [change for _, change in sorted(found, key=lambda item: item[0])]

    def _filled(self, placed: Placed, before: float) -> str:
        texts = []
        for hole in placed.holes:
            texts.append(self._range(*byte_range(self.source, hole), *self.limits(placed, hole, before)))
        return placed.template.fill(texts)

    def _insertion_point(self, placed: Placed) -> int:
        assert isinstance(placed.node, ast.stmt)
        if self.starts_line(placed.node):
            return self.source.offset(statement_span(placed.node).lineno, 0)
        return placed.low

    def _inserted(self, placed: Placed) -> str:
        assert isinstance(placed.node, ast.stmt)
        text = self._filled(placed, _NOW).strip("\n")
        if self.starts_line(placed.node):
            row = statement_span(placed.node).lineno - self.source.lineno
            return reindent(text, add=indentation(self.source.text.split("\n")[row])) + "\n"
        return text + "; "

    def _deletion(self, placed: Placed) -> tuple[int, int, str]:
        node = placed.node
        assert isinstance(node, ast.stmt)
        block = next(block for block in blocks(self.source.tree) if node in block)
        emptied = all(self.is_deleted(s) and not self.inserted_before(s) for s in block)
        if (emptied and block[0] is node) or not (self.starts_line(node) and self._ends_line(node)):
            return placed.low, placed.high, "pass"
        span = statement_span(node)
        start = self.source.offset(span.lineno, 0)
        return start, start + len("".join(self._lines(span)).encode()), ""

    def _lines(self, span: SourceSpan) -> list[str]:
        rows = self.source.text.split("\n")
        return [row + "\n" for row in rows[span.lineno - self.source.lineno : span.end_lineno + 1 - self.source.lineno]]

    def starts_line(self, node: ast.stmt) -> bool:
        span = statement_span(node)
        return (span.lineno - self.source.lineno, span.col) in self.source.layout.starts

    def _ends_line(self, node: ast.stmt) -> bool:
        span = statement_span(node)
        return (span.end_lineno - self.source.lineno, span.end_col) in self.source.layout.ends


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements under a node."""
    for child in ast.walk(node):
        for _, value in ast.iter_fields(child):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


class _Builder:
    """Copies the original tree with the edits in it."""

    def __init__(self, rendering: Rendering, with_deleted: bool = False) -> None:
        self.rendering = rendering
        self.with_deleted = with_deleted
        self.copies: dict[ast.AST, ast.AST] = {}
        self.origins: dict[ast.AST, ast.AST] = {}
        self.replaced: dict[ast.AST, ast.AST] = {}
        self.elsewhere = 0  # depth of placeholders filled from another place

    def function(self) -> FunctionNode:
        built = self._copy(self.rendering.source.tree, _NOW)
        assert isinstance(built, ast.FunctionDef | ast.AsyncFunctionDef)
        return built

    def expression(self, node: ast.expr, before: float, below: float) -> ast.expr:
        placed = self.rendering.replacement(node, before, below)
        if placed is None:
            copy = self._copy(node, before)
            assert isinstance(copy, ast.expr)
            return copy
        built = self._template(placed, before)[0]
        assert isinstance(built, ast.expr)
        if not self.elsewhere:
            self.copies[node] = built
            self.replaced[built] = node
        return built

    def _template(self, placed: Placed, before: float) -> list[ast.AST]:
        contents = []
        for hole in placed.holes:
            limits = self.rendering.limits(placed, hole, before)
            foreign = limits[0] != before or placed.edit.kind != "replace"
            self.elsewhere += foreign
            contents.append(self.expression(hole, *limits))
            self.elsewhere -= foreign
        return placed.template.tree(contents)

    def _copy(self, node: ast.AST, before: float) -> ast.AST:
        if isinstance(node, SHARED):
            return node
        fields: dict[str, object] = {}
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                if value and isinstance(value[0], ast.stmt):
                    fields[name] = self._block(value, before)
                else:
                    fields[name] = [self._child(item, before) for item in value]
            else:
                fields[name] = self._child(value, before)
        copy = ast.copy_location(type(node)(**fields), node)
        if not self.elsewhere:
            self.copies[node] = copy
        self.origins[copy] = node
        return copy

    def _child(self, value: object, before: float) -> object:
        if isinstance(value, ast.expr):
            return self.expression(value, before, _NOW)
        return self._copy(value, before) if isinstance(value, ast.AST) else value

    def _block(self, statements: list[ast.stmt], before: float) -> list[ast.AST]:
        built: list[ast.AST] = []
        for statement in statements:
            for placed in self.rendering.inserted_before(statement):
                built += self._template(placed, before)
            if self.with_deleted or not self.rendering.is_deleted(statement):
                built.append(self._copy(statement, before))
            elif self.rendering.leaves_pass(statement):
                built.append(ast.Pass())
        return built
