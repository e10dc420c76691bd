"""From edited text to a function that debuggers, tracebacks and ``inspect`` accept."""

from __future__ import annotations

import ast
import hashlib
import inspect
import types
from dataclasses import dataclass
from pathlib import Path

from ast_rewrite._decorators import copied, rebuilt
from ast_rewrite._edit import Edit
from ast_rewrite._errors import Refused
from ast_rewrite._files import Surroundings, remember_surroundings
from ast_rewrite._quiet import parse_quietly
from ast_rewrite._shell import compile_definition, stripped
from ast_rewrite._source import FunctionSource
from ast_rewrite._store import store

_KINDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE


@dataclass(frozen=True, slots=True, eq=False)
class CompiledRewrite:
    """A rewritten function.

    Attributes:
        function: the new function inside copies of the decorators of the original.
        inner: the new function without decorators. It shares globals, defaults and closure cells with the original.
        text: all of the file: two comment lines that say where it comes from, then the new definition.
        sha256: hex digest of `text`.
        filename: the file that holds `text` (if its folder can be written), under which it was compiled.
        source_sha256: `FunctionSource.sha256` of the original.
        edits: what was done, in order.
    """

    function: types.FunctionType
    inner: types.FunctionType
    text: str
    sha256: str
    filename: str
    source_sha256: str
    edits: tuple[Edit, ...]


def compile_rewrite(
    source: FunctionSource, definition: str, edits: tuple[Edit, ...], folder: Path | None
) -> CompiledRewrite:
    """Compile the dedented text of a definition in the place of the original.

    Raises Refused if the text needs a closure variable that the original function does not have.
    """
    original = source.function
    text = (
        f"# Made by ast_rewrite from {source.portable_filename}:{source.lineno}, {source.qualname}\n"
        f"# with {len(edits)} edit{'' if len(edits) == 1 else 's'}; nobody reads this file back to run it.\n"
        + definition
    )
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    filename = store(text, name=source.qualname, sha256=sha256, folder=folder)
    remember_surroundings(filename, Surroundings(source.qualname, source.class_name, source.imports))
    try:
        node = parse_quietly(text, filename).body[0]
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        code = compile_definition(
            stripped(node),
            original.__code__,
            class_name=source.class_name,
            imports=source.imports,
            filename=filename,
        )
    except (SyntaxError, ValueError) as error:
        raise Refused(f"the edited function does not compile: {error}") from error
    if (code.co_flags ^ original.__code__.co_flags) & _KINDS:
        raise Refused("the edits add or take away yield or await, which makes another kind of function")
    cells = dict(zip(original.__code__.co_freevars, original.__closure__ or (), strict=True))
    if missing := [name for name in code.co_freevars if name not in cells]:
        raise Refused(
            f"the edited function needs the closure variable {missing[0]}, which {source.qualname} does not capture"
        )
    inner = copied(original, code, tuple(cells[name] for name in code.co_freevars))
    function = rebuilt(source.chain[0], original, inner)
    return CompiledRewrite(function, inner, text, sha256, filename, source.sha256, edits)
