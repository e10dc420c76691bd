"""Edits of one function at exact spans."""

from __future__ import annotations

import ast
import difflib
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path

from ast_rewrite._checks import (
    known_names,
    require_evaluated_once,
    require_names_known,
    require_no_capture,
    require_place,
    require_same_values,
)
from ast_rewrite._compile import CompiledRewrite, compile_rewrite
from ast_rewrite._delete import require_no_other_effect, require_unread
from ast_rewrite._edit import Edit, Kind
from ast_rewrite._errors import Refused
from ast_rewrite._flow import Flow, simple_path
from ast_rewrite._hoist import Decided, require_hoistable
from ast_rewrite._layout import indentation, physical_lines, reindent
from ast_rewrite._names import bound_names, unused_name
from ast_rewrite._render import Placed, Rendering, place
from ast_rewrite._source import FunctionSource
from ast_rewrite._span import SourceSpan
from ast_rewrite._template import Mode, Template, same_tree
from ast_rewrite._writes import Pure


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

        Where `span` is all of ``name += value``, it is what is added that is not needed: the name keeps what it had, and may be read.

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
        decided: Decided | None = None,
        named: Mapping[SourceSpan, SourceSpan] | None = None,
    ) -> tuple[str, ...]:
        """Compute several expressions together, before the first statement that contains one of them.

        ``names = template`` is inserted there, and each expression is replaced by its name. That the template computes what
        the expressions did, given the inputs, that these wrote to nothing, and that their results share no memory with the
        inputs, is for the caller to know; that it may be computed there is proved here.

        Args:
            spans: expressions that lie in one block, or in branches below it that are `decided`, and are evaluated whenever it is.
            template: text of an expression; ``{0}`` is the text of the first input, and so on. It yields one value if there
                is one name, else a sequence with a value for each.
            names: wanted names; a number is put behind one that the function knows already.
            inputs: what the expressions are computed from: names, attributes of names, constants. Each must be proved to have
                the same value at every span as at the new statement.
            pure: tells of a call in between that it writes to none of its arguments; any other may. Without it, calls of
                attributes (methods without a trailing underscore, modules) are taken to be so; calls of plain names are not.
            decided: tells of the test of an ``if`` that it always comes out so that the expressions below it are evaluated.
            named: places of names in the expressions that the caller knows to be other names of an input there, and which: the input
                itself need not be bound by then under that name.

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
        targets = [self.source.read_at(span) for span in spans]
        given = [self.source.read_at(span) for span in inputs]
        rendering = Rendering(self.source, self._placed)
        known = {self.source.read_at(span): self.source.read_at(other) for span, other in (named or {}).items()}
        if any(not any(same_tree([other], [one]) for one in given) for other in known.values()):
            raise ValueError("a name was said to be that of something that is no input")
        first = require_hoistable(self.source, rendering.current(), targets, given, pure, decided, list(known))
        taken = known_names(self.source) | bound_names(ast.walk(rendering.current().tree))
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
        one, two = self.source.read_at(first), self.source.read_at(last)
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
        require_evaluated_once(rendering)
        return reindent(text, remove=indentation(self.source.text))

    def diff(self) -> str:
        """A unified diff from the original definition to the new one; empty if nothing changed."""
        old, new = (physical_lines(text) for text in (self.source.dedented, self.result()))
        return "".join(
            difflib.unified_diff(old, new, f"{self.source.portable_filename}:{self.source.lineno}", "rewritten")
        )

    def compile(self, *, folder: Path | None = None) -> CompiledRewrite:
        """Compile the new definition, in a file under `folder` (default: the user's cache folder).

        Raises Refused if it reads a name that is neither in the function, its closure and its module nor a builtin.
        """
        text = self.result()
        require_names_known(Rendering(self.source, self._placed))
        return compile_rewrite(self.source, text, self.edits, folder)

    def _redo(self, edit: Edit) -> None:
        """Do a recorded edit again, without asking for the proofs that were given when it was made (for `replay`)."""
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
        holes = [self.source.read_at(spans[name]) for name in parsed.names]
        texts = [rendering.range_text(SourceSpan.of(hole)) for hole in holes]
        trees = [rendering.expression_tree(hole) for hole in holes]
        parsed.tree(trees)  # it must parse by itself, without the parentheses that may be put around it
        parsed = parsed.parenthesised(texts, trees)
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
        require_place(self.source, self._placed, new)
        if not moved:
            require_same_values(self.source, self._placed, new)
        require_no_capture(Rendering(self.source, self._placed), new)
        candidate = Rendering(self.source, (*self._placed, new))
        if problem := candidate.problem():
            raise Refused(problem, edit.span)
        require_unread(candidate)
        self._placed = (*self._placed, new)


def _mode(kind: Kind) -> Mode:
    return "eval" if kind == "replace" else "exec"


def _block(template: str) -> str:
    """A template of statements without blank lines around it and without common indentation."""
    lines = template.split("\n")
    while lines and not lines[0].strip():
        lines.pop(0)
    while lines and not lines[-1].strip():
        lines.pop()
    text = "\n".join(lines)
    try:
        return reindent(text, remove=indentation(text))
    except (tokenize.TokenError, SyntaxError):  # parsing it says what is wrong
        return text
