"""Edits of one function at exact spans."""

from __future__ import annotations

import ast
import builtins
import difflib
from collections.abc import Sequence
from pathlib import Path

from ast_rewrite._compile import CompiledRewrite, compile_rewrite
from ast_rewrite._delete import require_no_other_effect, require_unread
from ast_rewrite._edit import Edit, Kind
from ast_rewrite._errors import Refused
from ast_rewrite._flow import Flow, simple_path
from ast_rewrite._hoist import require_hoistable
from ast_rewrite._layout import indentation, reindent
from ast_rewrite._names import bound_by, bound_names, paths_read, unused_name
from ast_rewrite._order import evaluated
from ast_rewrite._render import Placed, Rendering, place
from ast_rewrite._source import FunctionSource
from ast_rewrite._span import SourceSpan
from ast_rewrite._template import Mode, Template, same_tree
from ast_rewrite._writes import Pure

_ONCE = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)


class Patch:
    """A list of edits of one function. An edit that is refused leaves the patch as it was.

    Spans always name places of the original text, whatever has been edited since.
    """

    def __init__(self, source: FunctionSource) -> None:
        self.source = source
        self._placed: tuple[Placed, ...] = ()

    @property
    def edits(self) -> tuple[Edit, ...]:
        """What was done, in order."""
        return tuple(placed.edit for placed in self._placed)

    def text(self, span: SourceSpan) -> str:
        """The text of a span as it is now, edits inside it applied. Raises ValueError outside of the function."""
        return Rendering(self.source, self._placed).range_text(span)

    def replace(
        self, span: SourceSpan, template: str, *, dropping: Sequence[SourceSpan] = (), **spans: SourceSpan
    ) -> None:
        """Put an expression in the place of the one at `span`.

        Args:
            span: exactly one expression.
            template: text of an expression, with ``{name}`` for the text that a span has now; parentheses are added where
                precedence needs them. Literal braces are doubled.
            dropping: spans inside `span` whose earlier edits may be lost. Other earlier edits inside `span` must lie in a
                placeholder.
            spans: the span of each placeholder. One outside of `span` is a copy, taken now, of an expression that must be
                proved to have the same value here.

        Raises:
            Refused: the edit cannot be proved to do what it says.
            ValueError: a placeholder without a span, or a span without a placeholder.
        """
        self._apply(self._parenthesised("replace", span, template, spans, tuple(dropping)))

    def insert_before(self, span: SourceSpan, template: str, **spans: SourceSpan) -> None:
        """Put statements before the statement that contains `span`, at its indentation.

        What the placeholders stand for is computed earlier than it was: Refused unless what it reads is proved to have the
        same value there. Refused also where there is no line to put a statement on (``elif``). Before a statement that shares
        its line with another, only one simple statement can be put.
        """
        self._apply(self._parenthesised("insert", span, template, spans, ()))

    def delete(self, span: SourceSpan) -> None:
        """Delete the statement that contains `span`, whose value is not needed any more.

        Refused if the statement binds a name that is read after it, calls anything outside of `span`, stores into an object,
        or is no expression and no assignment.
        """
        statement = self.source.statement_at(span)
        require_no_other_effect(self.source, statement, span)
        self._apply(Edit("delete", SourceSpan.of(statement), dropping=(span,)))

    def hoist(
        self,
        spans: Sequence[SourceSpan],
        template: str,
        names: Sequence[str],
        inputs: Sequence[SourceSpan],
        *,
        pure: Pure | None = None,
    ) -> tuple[str, ...]:
        """Compute several expressions together, before the first statement that contains one of them.

        ``names = template`` is inserted there, and each expression is replaced by its name. That the template computes what
        the expressions did, given the inputs, is for the caller to know; that it may be computed there is proved here.

        Args:
            spans: expressions that lie in one block and are evaluated whenever it is.
            template: text of an expression; ``{0}`` is the text of the first input, and so on. It yields one value if there
                is one name, else a sequence with a value for each.
            names: wanted names; a number is put behind one that the function knows already.
            inputs: what the expressions are computed from: names, attributes of names, constants. Each must be proved to have
                the same value at every span as at the new statement.
            pure: tells of a call in between that it writes to none of its arguments. Calls of attributes (methods without a
                trailing underscore, modules) are taken to be so; calls of plain names are not.

        Returns:
            The names that were used.

        Raises:
            Refused: with the reason, and the place that decided.
            ValueError: the numbers of spans and names differ, or there are none.
        """
        if len(spans) != len(names) or not spans:
            raise ValueError(
                f"{len(spans)} spans and {len(names)} names; expected as many names as spans, at least one"
            )
        targets = [self.source.expression_at(span) for span in spans]
        given = [self.source.expression_at(span) for span in inputs]
        rendering = Rendering(self.source, self._placed)
        first = require_hoistable(self.source, rendering.current(), targets, given, pure)
        taken = self._known_names() | bound_names(ast.walk(rendering.current().tree))
        made: list[str] = []
        for name in names:
            made.append(unused_name(name, taken | set(made)))
        before = self._placed
        try:
            holes = {str(at): span for at, span in enumerate(inputs)}
            text = f"{', '.join(made)} = {template.strip()}"
            used = {name: span for name, span in holes.items() if name in Template.parse(text, "exec").names}
            self._apply(self._parenthesised("insert", SourceSpan.of(first), text, used, ()), moved=True)
            for target, name in zip(targets, made, strict=True):
                span = SourceSpan.of(target)
                self._apply(self._parenthesised("replace", span, name, {}, (span,)))
        except BaseException:
            self._placed = before
            raise
        return tuple(made)

    def is_value_unchanged(self, first: SourceSpan, last: SourceSpan, *, pure: Pure | None = None) -> None:
        """Raises Refused unless two inputs (names, attributes, constants) read the same and are proved to have one value."""
        one, two = self.source.expression_at(first), self.source.expression_at(last)
        simple_path(one)
        if not same_tree([one], [two]):
            raise Refused(f"{ast.unparse(one)} and {ast.unparse(two)} are not the same expression", last)
        flow = Flow(self.source, Rendering(self.source, self._placed).current(), pure)
        here, there = flow.now(one), flow.now(two)
        assert isinstance(here, ast.expr)
        assert isinstance(there, ast.expr)
        if not same_tree([here], [there]):
            raise Refused("an edit changed one of the two expressions", last)
        flow.require_same_value(here, there)

    def result(self) -> str:
        """The new definition without its decorators, dedented. Raises Refused if an expression was copied and kept."""
        rendering = Rendering(self.source, self._placed)
        text = rendering.text()
        self._require_evaluated_once(rendering)
        return reindent(text, remove=indentation(self.source.text))

    def diff(self) -> str:
        """A unified diff from the original definition to the new one; empty if nothing changed."""
        old, new = (t.splitlines(keepends=True) for t in (self.source.dedented, self.result()))
        return "".join(difflib.unified_diff(old, new, f"{self.source.filename}:{self.source.lineno}", "rewritten"))

    def compile(self, *, folder: Path | None = None) -> CompiledRewrite:
        """Compile the new definition, in a file under `folder` (default: the user's cache folder).

        Raises Refused if it reads a name that is neither in the function, its closure and its module nor a builtin.
        """
        text = self.result()
        self._require_names_known()
        return compile_rewrite(self.source, text, self.edits, folder)

    def apply(self, edit: Edit) -> None:
        """Do a recorded edit again, without asking for the proofs that were given when it was made."""
        self._apply(edit, moved=True)

    def _parenthesised(
        self,
        kind: Kind,
        span: SourceSpan,
        template: str,
        spans: dict[str, SourceSpan],
        dropping: tuple[SourceSpan, ...],
    ) -> Edit:
        """The edit with the parentheses that its template needs, inside and around."""
        parsed = Template.parse(template.strip() if kind == "replace" else _block(template), _mode(kind))
        if unused := sorted(set(spans) - set(parsed.names)):
            raise ValueError(f"the template {template!r} has no placeholder {{{unused[0]}}}")
        if missing := sorted(set(parsed.names) - set(spans)):
            raise ValueError(f"no span was given for placeholder {{{missing[0]}}} of {template!r}")
        rendering = Rendering(self.source, self._placed)
        holes = [self.source.expression_at(spans[name]) for name in parsed.names]
        texts = [rendering.range_text(SourceSpan.of(hole)) for hole in holes]
        parsed = parsed.parenthesised(texts, [rendering.expression_tree(hole) for hole in holes])
        placeholders = tuple((name, SourceSpan.of(self.source.expression_at(s))) for name, s in spans.items())
        if kind == "insert":
            return Edit("insert", span, parsed.escaped(), placeholders)
        span = SourceSpan.of(self.source.expression_at(span))
        bare = Edit("replace", span, parsed.escaped(), placeholders, dropping)
        candidate = Rendering(self.source, (*self._placed, place(self.source, bare, len(self._placed))))
        if candidate.problem() is None:
            return bare
        return Edit("replace", span, parsed.wrapped("(", ")").escaped(), placeholders, dropping)

    def _apply(self, edit: Edit, *, moved: bool = False) -> None:
        """Add an edit if it is sound. `moved`: that its placeholders may be evaluated elsewhere is known already."""
        new = place(self.source, edit, len(self._placed))
        self._require_place(new)
        if not moved:
            self._require_same_values(new)
        candidate = Rendering(self.source, (*self._placed, new))
        if problem := candidate.problem():
            raise Refused(problem, edit.span)
        require_unread(candidate)
        self._require_no_capture(candidate)
        self._placed = (*self._placed, new)

    def _require_place(self, new: Placed) -> None:
        """Raises Refused if an earlier edit took the place away, or would be lost in the new one."""
        if new.edit.kind == "insert":
            _require_line(self.source, new)
        for old in self._placed:
            if old.edit.kind == "insert":
                continue
            encloses = old.low <= new.low and new.high <= old.high
            if encloses and old.edit.kind == "delete":
                if new.edit.kind != "insert":
                    raise Refused("the statement was deleted by an earlier edit", new.edit.span)
            elif encloses and (old.low, old.high) != (new.low, new.high) and new.edit.kind == "replace":
                if not old.carries(new.low, new.high, self.source):
                    raise Refused("an earlier edit replaced what contains this and did not keep it", new.edit.span)
            elif new.edit.kind != "insert" and new.low <= old.low and old.high <= new.high and self._is_visible(old):
                lost = not new.carries(old.low, old.high, self.source)
                if lost and not any(span.contains(old.edit.span) for span in new.edit.dropping):
                    raise Refused(
                        "an earlier edit in here would be lost; keep it in a placeholder, or drop it", old.edit.span
                    )

    def _is_visible(self, edit: Placed) -> bool:
        return all(
            outer is edit
            or outer.edit.kind != "replace"
            or not (outer.low <= edit.low and edit.high <= outer.high)
            or ((outer.low, outer.high) == (edit.low, edit.high) and outer.order < edit.order)
            or outer.carries(edit.low, edit.high, self.source)
            for outer in self._placed
        )

    def _require_same_values(self, new: Placed) -> None:
        """Raises Refused if a placeholder is filled from a place where what it reads may have another value."""
        foreign = [
            hole
            for hole in new.holes
            if new.edit.kind == "insert" or not (new.low <= self.source.offset(*SourceSpan.of(hole).start) < new.high)
        ]
        if not foreign:
            return
        flow = Flow(self.source, Rendering(self.source, self._placed).current())
        for hole in foreign:
            there, here = flow.now(hole), flow.now(new.node)
            if isinstance(here, ast.stmt):
                start = next(evaluated(here))
                if flow.index[there] >= flow.index[start]:
                    nodes = flow.region(None, there, start=here)
                else:
                    flow.require_sequence(there, start)
                    nodes = flow.region(there, start)
            else:
                one, two = sorted((there, here), key=lambda node: flow.index[node])
                flow.require_sequence(one, two)
                nodes = flow.region(one, two)
            for path in dict.fromkeys(paths_read(there)):
                flow.require_unchanged(path, nodes)

    def _require_no_capture(self, candidate: Rendering) -> None:
        """Raises Refused if an edit binds a name that the function reads from its module, its closure or the builtins."""
        code = self.source.function.__code__
        local = bound_names([self.source.tree])
        current = candidate.current()
        made = [node for node in ast.walk(current.tree) if node not in current.origins]
        new = {name for node in made for name in bound_by(node)} - local
        new |= {name for node in made for name in bound_by(node)} & set(code.co_freevars)
        for node in ast.walk(current.tree):
            if (
                isinstance(node, ast.Name)
                and node.id in new
                and node in current.origins
                and isinstance(node.ctx, ast.Load)
            ):
                raise Refused(
                    f"an edit binds {node.id}, which the function reads from outside", candidate.placed[-1].edit.span
                )

    def _require_evaluated_once(self, rendering: Rendering) -> None:
        for node in ast.walk(self.source.tree):
            if isinstance(node, _ONCE):
                low, high = (
                    self.source.offset(*place) for place in (SourceSpan.of(node).start, SourceSpan.of(node).end)
                )
                at = high - 1 if isinstance(node, ast.Call) else low
                if sum(start <= at < end for start, end in rendering.emitted) > 1:
                    raise Refused(f"{ast.unparse(node)} was copied and would be evaluated twice", SourceSpan.of(node))

    def _known_names(self) -> set[str]:
        """Names that mean something in the function as it was: no new variable may have one of them."""
        function = self.source.function
        names = {n.id for n in ast.walk(self.source.tree) if isinstance(n, ast.Name)} | bound_names([self.source.tree])
        return names | set(function.__code__.co_freevars) | set(function.__globals__)

    def _require_names_known(self) -> None:
        tree = Rendering(self.source, self._placed).current()
        known = self._known_names() | bound_names([tree.tree]) | set(dir(builtins)) | {"__class__"}
        for node in ast.walk(tree.tree):
            if isinstance(node, ast.Name) and node not in tree.origins and node.id not in known:
                raise Refused(f"an edit reads {node.id}, which is no name of the function, its module or the builtins")


def _mode(kind: Kind) -> Mode:
    return "eval" if kind == "replace" else "exec"


def _block(template: str) -> str:
    """A template of statements without blank lines around it and without common indentation."""
    lines = template.split("\n")
    while lines and not lines[0].strip():
        lines.pop(0)
    while lines and not lines[-1].strip():
        lines.pop()
    margin = indentation(lines[0]) if lines else ""
    return "\n".join(line.removeprefix(margin) for line in lines)


def _require_line(source: FunctionSource, new: Placed) -> None:
    """Raises Refused where no statement can be put before this one."""
    assert isinstance(new.node, ast.stmt)
    if source.text.encode()[new.low : new.high].startswith(b"elif"):
        raise Refused("no statement can stand before an elif", new.edit.span)
    rendering = Rendering(source, ())
    if not rendering.starts_line(new.node):
        statements = new.template.tree(new.holes)
        if len(statements) != 1 or hasattr(statements[0], "body") or "\n" in new.edit.text:
            raise Refused(
                "the statement shares its line, so only one simple statement can be put before it", new.edit.span
            )


def replay(
    fn: object, edits: Sequence[Edit], *, source_sha256: str, sha256: str, folder: Path | None = None
) -> CompiledRewrite:
    """Do recorded edits again on the same function, in another process.

    Raises Refused if the function's source, or the result, is not the one that was recorded.
    """
    source = FunctionSource.of(fn)  # type: ignore[arg-type]
    if source.sha256 != source_sha256:
        raise Refused(
            f"the source of {source.qualname} has hash {source.sha256}; the edits were made for {source_sha256}"
        )
    patch = Patch(source)
    for edit in edits:
        patch.apply(edit)
    made = patch.compile(folder=folder)
    if made.sha256 != sha256:
        raise Refused(f"the edits of {source.qualname} give text of hash {made.sha256}; expected {sha256}")
    return made
