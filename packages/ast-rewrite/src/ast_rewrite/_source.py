"""The source of one function, exactly as the interpreter compiled it."""

from __future__ import annotations

import ast
import hashlib
import tokenize
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ast_rewrite._decorators import chain
from ast_rewrite._errors import Refused, SourceUnavailable
from ast_rewrite._files import FunctionNode, source_file
from ast_rewrite._layout import Layout, indentation, layout, reindent
from ast_rewrite._shell import code_difference, compile_definition
from ast_rewrite._span import SourceSpan


@dataclass(frozen=True, eq=False)
class FunctionSource:
    """A function and its text, which is checked to be the text of the code that runs.

    Attributes:
        filename: the file, as the code object names it.
        lineno: line of the ``def`` (after its decorators).
        name: name in the ``def``.
        qualname: where the ``def`` stands lexically (``LlamaAttention.forward``).
        text: the lines of the ``def`` without its decorators, indented as in the file.
        full_text: the same with its decorators.
        sha256: hex digest of the dedented text: what a rewrite starts from.
        tree: the definition, parsed, with line numbers of the file.
        function: the undecorated function.
        decorated: the function that was given, decorators and all.
        class_name: the class whose name mangles ``__private`` names in the body, if the ``def`` lies in a class.
        imports: names that the module of the function imports, which change how CPython compiles calls.
        file_text: all of the file.
        chain: from `decorated` to `function`.
        layout: where logical lines start and end in `text`.
    """

    filename: str
    lineno: int
    name: str
    qualname: str
    text: str
    full_text: str
    sha256: str
    tree: FunctionNode = field(repr=False)
    function: types.FunctionType
    decorated: types.FunctionType
    class_name: str | None
    imports: frozenset[str] = field(repr=False)
    file_text: str = field(repr=False)
    chain: tuple[types.FunctionType, ...] = field(repr=False)
    layout: Layout = field(repr=False)
    _expressions: dict[SourceSpan, list[ast.expr]] = field(repr=False)
    _offsets: tuple[int, ...] = field(repr=False)
    _bytes: bytes = field(repr=False)

    @classmethod
    def of(cls, fn: Callable[..., Any], *, unwrap: bool = True) -> FunctionSource:
        """Recover the source of `fn`, of its innermost function if it is decorated (``unwrap=False``: of itself).

        Raises:
            SourceUnavailable: there is no source, or it is not the source of the code that runs.
            Refused: a decorator around the function could not be rebuilt around another one, or the function has type
                parameters (PEP 695).
        """
        functions = chain(fn, unwrap=unwrap)
        inner = functions[-1]
        code = inner.__code__
        if code.co_name == "<lambda>":
            raise SourceUnavailable(
                f"{code.co_filename}:{code.co_firstlineno} is a lambda; only a def can be rewritten"
            )
        file = source_file(code.co_filename, inner.__globals__)
        definition = file.find(code)
        where = f"{code.co_filename}:{code.co_firstlineno} ({code.co_qualname})"
        if definition is None:
            raise SourceUnavailable(
                f"{where}: there is no such def at that line; the file changed on disk since its import"
            )
        node = definition.node
        if getattr(node, "type_params", None):
            raise Refused(f"{where} has type parameters, which are not supported", SourceSpan.of(node))
        try:
            again = compile_definition(
                node, code, class_name=definition.class_name, imports=file.imports, filename=code.co_filename
            )
        except (SyntaxError, ValueError, StopIteration) as error:
            raise SourceUnavailable(f"{where} cannot be compiled by itself: {error}") from error
        has_columns = next((p[2] for p in code.co_positions() if p[2] is not None), None) is not None
        if different := code_difference(code, again, layout=has_columns):
            raise SourceUnavailable(
                f"{where}: {different} in the source is not what runs; the file changed on disk since its import, "
                "or its module was rewritten while it was imported"
            )
        assert node.end_lineno is not None
        text = "".join(file.lines[node.lineno - 1 : node.end_lineno])
        full_text = "".join(file.lines[definition.first_line - 1 : node.end_lineno])
        try:
            dedented, shape = reindent(text, remove=indentation(text)), layout(text)
        except (tokenize.TokenError, SyntaxError) as error:
            raise SourceUnavailable(f"{where} cannot be read token by token: {error}") from error
        offsets = [0]
        for line in text.encode().split(b"\n"):
            offsets.append(offsets[-1] + len(line) + 1)
        return cls(
            filename=code.co_filename,
            lineno=node.lineno,
            name=node.name,
            qualname=definition.qualname,
            text=text,
            full_text=full_text,
            sha256=hashlib.sha256(dedented.encode()).hexdigest(),
            tree=node,
            function=inner,
            decorated=functions[0],
            class_name=definition.class_name,
            imports=file.imports,
            file_text="".join(file.lines),
            chain=functions,
            layout=shape,
            _expressions=_index(node),
            _offsets=tuple(offsets),
            _bytes=text.encode(),
        )

    @property
    def span(self) -> SourceSpan:
        """From the ``def`` to the end of its last statement."""
        return SourceSpan.of(self.tree)

    @property
    def portable_filename(self) -> str:
        """The file's name from the folder of its top package on: the same on every machine. Elsewhere the whole name."""
        module = str(self.function.__module__ or "").replace(".", "/")
        for tail in (f"{module}.py", f"{module}/__init__.py"):
            if module and self.filename.replace("\\", "/").endswith("/" + tail):
                return tail
        return self.filename

    @property
    def receiver(self) -> str | None:
        """The name of the first parameter of a method (``self``); None for other functions and static methods."""
        args = self.tree.args
        named = [*args.posonlyargs, *args.args]
        is_method = self.class_name is not None and self.qualname.endswith(f"{self.class_name}.{self.name}")
        static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in self.tree.decorator_list)
        return named[0].arg if named and is_method and not static else None

    @property
    def dedented(self) -> str:
        """The text with the indentation of the ``def`` taken away; strings over several lines are left as they are."""
        return reindent(self.text, remove=indentation(self.text))

    def segment(self, span: SourceSpan) -> str:
        """The exact text of a span. Raises ValueError if it lies outside of the function."""
        return self._bytes[self.offset(*span.start) : self.offset(*span.end)].decode()

    def offset(self, lineno: int, col: int) -> int:
        """Byte offset in `text` of a place in the file. Raises ValueError if it lies outside of the function."""
        row = lineno - self.lineno
        if not 0 <= row < len(self._offsets) - 1 or self._offsets[row] + col >= self._offsets[row + 1]:
            raise ValueError(f"{self.filename}:{lineno}:{col} lies outside of {self.qualname}")
        return self._offsets[row] + col

    def expression_at(self, span: SourceSpan) -> ast.expr:
        """The expression of the body whose range is exactly `span`.

        A method call over several lines is also found by the range that the interpreter gives for it, which starts at
        the name of the method. Raises Refused if there is none, or if it lies inside an f-string.
        """
        found = self._expressions.get(span, [])
        if len(found) == 1:
            return found[0]
        if found:
            raise Refused(f"{len(found)} expressions have this very range", span)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.JoinedStr) and SourceSpan.of(node).contains(span):
                raise Refused("this lies inside an f-string, where positions cannot be relied on", span)
        raise Refused(f"no expression in the body of {self.qualname} has exactly this range", span)

    def read_at(self, span: SourceSpan) -> ast.expr:
        """`expression_at`, of an expression that is read. Raises Refused if it is assigned to or deleted."""
        node = self.expression_at(span)
        if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            raise Refused(f"{ast.unparse(node)} is assigned to or deleted here, not read", span)
        return node

    def normalised(self, span: SourceSpan) -> SourceSpan:
        """The range of the syntax tree for the range that the interpreter gives; `span` itself where they agree."""
        found = self._expressions.get(span, [])
        return SourceSpan.of(found[0]) if len(found) == 1 else span

    def statement_at(self, span: SourceSpan) -> ast.stmt:
        """The innermost statement of the body that contains `span`. Raises Refused if there is none."""
        found: ast.stmt | None = None
        for node in ast.walk(self.tree):
            if isinstance(node, ast.stmt) and node is not self.tree and statement_span(node).contains(span):
                found = node  # breadth first: a later one lies further in
        if found is None:
            raise Refused(f"no statement in the body of {self.qualname} contains this range", span)
        return found

    def names_assigned_between(self, first: SourceSpan, last: SourceSpan) -> frozenset[str]:
        """Names that a statement or a walrus binds in the text between two spans, in whatever branch or loop."""
        if last < first:
            first, last = last, first
        return frozenset(
            node.id
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Name)
            and not isinstance(node.ctx, ast.Load)
            and first.end <= SourceSpan.of(node).start < last.start
        )


def statement_span(node: ast.stmt) -> SourceSpan:
    """The span of a statement with its decorators, whose ``@`` stands in the column of the statement."""
    span = SourceSpan.of(node)
    decorators = getattr(node, "decorator_list", None)
    return SourceSpan(decorators[0].lineno, span.col, *span.end) if decorators else span


def _index(function: FunctionNode) -> dict[SourceSpan, list[ast.expr]]:
    """Expressions of the body by range; those inside f-strings are left out, since their positions are not exact."""
    index: dict[SourceSpan, list[ast.expr]] = {}

    def visit(node: ast.AST) -> None:
        slices = isinstance(node, ast.Tuple) and any(isinstance(element, ast.Slice) for element in node.elts)
        whole = isinstance(node, ast.expr) and not isinstance(node, ast.Slice | ast.Starred | ast.FormattedValue)
        if isinstance(node, ast.expr) and whole and not slices:
            for span in {SourceSpan.of(node), *_interpreter_spans(node)}:
                index.setdefault(span, []).append(node)
        if not isinstance(node, ast.JoinedStr):
            for child in ast.iter_child_nodes(node):
                visit(child)

    for statement in function.body:
        visit(statement)
    return index


def _interpreter_spans(node: ast.expr) -> list[SourceSpan]:
    """The other range that ``co_positions`` gives for an attribute on another line than the start of its value.

    CPython moves the start to the name of the attribute (``update_start_location_to_match_attr`` in compile.c).
    """
    attribute = node.func if isinstance(node, ast.Call) else node
    if not isinstance(attribute, ast.Attribute) or attribute.end_lineno is None or attribute.end_col_offset is None:
        return []
    start = attribute.end_col_offset - len(attribute.attr)
    if attribute.end_lineno == node.lineno or start < 0:
        return []
    return [SourceSpan(attribute.end_lineno, start, *SourceSpan.of(node).end)]
