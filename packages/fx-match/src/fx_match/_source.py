"""Where in the source a node was made: spans from the interpreter's own instruction positions.

While a forward runs, its frame is on the stack, and `co_positions()` at `f_lasti` is the range of the expression that is
being evaluated. Code that was compiled without columns (a cached file written under `PYTHONNODEBUGRANGES`) is compiled
again from its source, and the same instruction looked up there; where that gives none either, there is no span.
"""

from __future__ import annotations

import functools
import linecache
import os
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_TORCH_FOLDER = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep

Positions = list[tuple[int | None, int | None, int | None, int | None]]


@dataclass(frozen=True, slots=True, order=True)
class SourceSpan:
    """A range of source text: 1-based lines of the file, UTF-8 byte columns, end exclusive; as in `ast` nodes."""

    lineno: int
    col: int
    end_lineno: int
    end_col: int

    def __str__(self) -> str:
        return f"{self.lineno}:{self.col}-{self.end_lineno}:{self.end_col}"


@dataclass(frozen=True, slots=True)
class Location:
    """Where a node was made.

    `span` is the expression in the traced forward. The rest describes the innermost Python frame outside torch, which
    is the forward itself, or a helper that the forward called (then `helper_span` is the expression in that helper).
    """

    span: SourceSpan | None
    file: str | None
    line: int | None
    function: str | None
    helper_span: SourceSpan | None

    @property
    def text(self) -> str:
        """The source line, stripped; empty if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip() if self.file and self.line else ""

    def __str__(self) -> str:
        return f"{self.file or '<unknown>'}:{self.line or '?'}"


class FrameReader:
    """Finds the forward's frame on the stack and reads spans; keeps the position tables of one trace."""

    def __init__(self, forward: types.CodeType) -> None:
        self._key = _identity(forward)
        self._tables: dict[int, tuple[types.CodeType, Positions]] = {}

    def span(self, code: types.CodeType, instruction: int) -> SourceSpan | None:
        """The span of the instruction at byte offset `instruction` of `code`, or None where no columns can be had."""
        table = self._tables.get(id(code))
        if table is None:
            table = self._tables[id(code)] = (code, _positions(code))
        index = instruction // 2
        if not 0 <= index < len(table[1]):
            return None
        line, end_line, column, end_column = table[1][index]
        if line is None or end_line is None or column is None or end_column is None:
            return None
        return SourceSpan(line, column, end_line, end_column)

    def locate(self, frame: types.FrameType | None) -> Location:
        """The location of the expression that is being evaluated, seen from `frame` outwards."""
        inner: types.FrameType | None = None
        while frame is not None:
            code = frame.f_code
            if _identity(code) == self._key:
                span = self.span(code, frame.f_lasti)
                if inner is None:
                    return Location(span, code.co_filename, frame.f_lineno, code.co_name, None)
                return self._in_helper(span, inner)
            if inner is None and not _is_machinery(code.co_filename):
                inner = frame
            frame = frame.f_back
        return Location(None, None, None, None, None) if inner is None else self._in_helper(None, inner)

    def locate_traceback(self, traceback: types.TracebackType | None) -> Location:
        """The location at which an exception passed the forward, and the innermost frame that it came from."""
        span, inner, outer = None, None, None
        while traceback is not None:
            code = traceback.tb_frame.f_code
            if _identity(code) == self._key:
                span, inner, outer = self.span(code, traceback.tb_lasti), None, traceback
            elif not _is_machinery(code.co_filename):
                inner = traceback
            traceback = traceback.tb_next
        found = inner or outer
        if found is None:
            return Location(None, None, None, None, None)
        code = found.tb_frame.f_code
        helper = self.span(code, found.tb_lasti) if inner is not None else None
        return Location(span, code.co_filename, found.tb_lineno, code.co_name, helper)

    def _in_helper(self, span: SourceSpan | None, frame: types.FrameType) -> Location:
        code = frame.f_code
        return Location(span, code.co_filename, frame.f_lineno, code.co_name, self.span(code, frame.f_lasti))


def _identity(code: types.CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_name


def _is_machinery(filename: str) -> bool:
    return filename.startswith((_TORCH_FOLDER, _OWN_FOLDER, "<frozen"))


def called_by_machinery(frame: types.FrameType | None) -> bool:
    """Whether the call that `frame` deals with came from torch's own Python code."""
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_FOLDER):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH_FOLDER)


def _positions(code: types.CodeType) -> Positions:
    table = list(code.co_positions())
    if any(column is not None for _, _, column, _ in table):
        return table
    return _recompiled_positions(code) or table


def _recompiled_positions(code: types.CodeType) -> Positions | None:
    """Positions of the same code object compiled again from its file, if that gives the same instructions."""
    module = _recompile(code.co_filename)
    for candidate in _nested_code(module) if module is not None else ():
        if _identity(candidate) == _identity(code) and candidate.co_code == code.co_code:
            table = list(candidate.co_positions())
            return table if any(column is not None for _, _, column, _ in table) else None
    return None


@functools.lru_cache(maxsize=8)
def _recompile(filename: str) -> types.CodeType | None:
    text = "".join(linecache.getlines(filename))
    try:
        return compile(text, filename, "exec", dont_inherit=True) if text else None
    except (SyntaxError, ValueError):
        return None


def _nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested_code(constant)


def undecorated(function: Callable[..., Any], name: str) -> types.FunctionType | None:
    """The function whose code is on the stack when `function`, decorated or not, does its own work.

    Follows bound methods, partials and `__wrapped__`. A decorator without `functools.wraps` keeps the real function in a
    closure cell: then the one function named `name` that can be reached through cells is taken. None for a builtin.
    """
    seen: set[int] = set()
    current: Any = function
    while id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, types.MethodType):
            current = current.__func__
        elif isinstance(current, functools.partial):
            current = current.func
        elif hasattr(current, "__wrapped__"):
            current = current.__wrapped__
    if not isinstance(current, types.FunctionType):
        return None
    if current.__code__.co_name == name:
        return current
    hidden = [inner for inner in _functions_in_cells(current, set()) if inner.__code__.co_name == name]
    return hidden[0] if len(hidden) == 1 else current


def _functions_in_cells(function: types.FunctionType, seen: set[int]) -> Iterator[types.FunctionType]:
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        value = getattr(value, "__func__", value)
        if isinstance(value, types.FunctionType) and id(value) not in seen:
            seen.add(id(value))
            yield value
            yield from _functions_in_cells(value, seen)
