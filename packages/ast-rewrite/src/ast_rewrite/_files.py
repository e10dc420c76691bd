"""Parsed source files, and the definition in them that a code object came from."""

from __future__ import annotations

import ast
import linecache
import threading
import types
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ast_rewrite._errors import SourceUnavailable
from ast_rewrite._quiet import parse_quietly

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

_KEPT = 16  # parsed files held at once; a modeling file is about 3 MB as a tree
_parsed: OrderedDict[str, SourceFile] = OrderedDict()
_surroundings: dict[str, Surroundings] = {}  # of files that hold one definition each, taken from elsewhere
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the text of a definition does not say about where it stands."""

    qualname: str
    class_name: str | None
    imports: frozenset[str]


def remember_surroundings(filename: str, surroundings: Surroundings) -> None:
    """Note where the only definition of a generated file was taken from, so that it can be read like any other."""
    _surroundings[filename] = surroundings


@dataclass(frozen=True, slots=True)
class Definition:
    """One ``def`` of a file, with where it lies lexically."""

    node: FunctionNode
    qualname: str
    class_name: str | None  # the class whose name mangles ``__private`` names in the body
    enclosing: FunctionNode | None  # the function directly around it

    @property
    def first_line(self) -> int:
        """The line that ``co_firstlineno`` gives: of the first decorator, else of the ``def``."""
        return min([self.node.lineno, *(decorator.lineno for decorator in self.node.decorator_list)])


@dataclass(frozen=True, slots=True)
class SourceFile:
    """The lines of a file and its definitions, keyed by first line and name."""

    filename: str
    lines: tuple[str, ...]
    imports: frozenset[str] = frozenset()  # names of the module's own scope that change how methods are called
    definitions: dict[tuple[int, str], list[Definition]] = field(default_factory=dict)

    def find(self, code: types.CodeType) -> Definition | None:
        """The definition that a code object was compiled from, by first line, name and qualified name."""
        found = self.definitions.get((code.co_firstlineno, code.co_name), [])
        exact = [definition for definition in found if definition.qualname == code.co_qualname]
        if len(exact) == 1:
            return exact[0]
        return found[0] if len(found) == 1 else None


def source_file(filename: str, module_globals: dict[str, Any] | None = None) -> SourceFile:
    """Read and parse a file through ``linecache``. Raises SourceUnavailable if there is no text or it does not parse."""
    linecache.checkcache(filename)
    lines = tuple(linecache.getlines(filename, module_globals))
    if not lines:
        raise SourceUnavailable(f"no source text for {filename}: the code was generated, or its file is not there")
    with _lock:
        known = _parsed.get(filename)
        if known is not None and known.lines == lines:
            _parsed.move_to_end(filename)
            return known
    try:
        tree = parse_quietly("".join(lines), filename)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise SourceUnavailable(f"{filename} does not parse as it is on disk now: {error}") from error
    parsed = SourceFile(filename, lines, frozenset(_imported(tree)))
    around = _surroundings.get(filename)
    if around is not None:
        parsed = replace(parsed, imports=around.imports)
    for definition in _definitions(tree, (), None, None):
        if around is not None and definition.enclosing is None:
            definition = replace(definition, qualname=around.qualname, class_name=around.class_name)
        parsed.definitions.setdefault((definition.first_line, definition.node.name), []).append(definition)
    with _lock:
        _parsed[filename] = parsed
        while len(_parsed) > _KEPT:
            _parsed.popitem(last=False)
    return parsed


def _definitions(
    node: ast.AST, path: tuple[str, ...], class_name: str | None, enclosing: FunctionNode | None
) -> Iterator[Definition]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Definition(child, ".".join((*path, child.name)), class_name, enclosing)
            yield from _definitions(child, (*path, child.name, "<locals>"), class_name, child)
        elif isinstance(child, ast.ClassDef):
            yield from _definitions(child, (*path, child.name), child.name, None)
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _definitions(child, path, class_name, enclosing)


def _imported(node: ast.AST) -> Iterator[str]:
    """Names that an import binds in the module's own scope, and ``super`` if that scope mentions it.

    CPython compiles ``torch.mul(x)`` and ``super().f(x)`` in other ways depending on these.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in child.names if alias.name != "*")
        elif isinstance(child, ast.Name) and child.id == "super":
            yield "super"
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _imported(child)
