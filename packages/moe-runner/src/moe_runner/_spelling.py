"""Which modules can choose at all: whether the code behind a forward spells a top-k. Cheap, and cached by function.

In: a module. Out: the places in its forward, and in the functions and methods that it calls, at which an operation is
named that can choose (`CHOICE_OPS`). This only tells where a trace is worth its time, and stands in for one where a module
was never called.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import linecache
import types
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

CHOICE_OPS = frozenset({"topk", "argmax", "max", "sort", "argsort"})
_MAX_CALLS = 4
"""How many calls deep the code is read."""


@dataclass(frozen=True, slots=True)
class Mention:
    """One line that names a choice."""

    op: str
    module: str
    line: int
    text: str

    @property
    def is_top_k(self) -> bool:
        """Whether nothing but a choice is spelled so; code is full of maxima and sorts that choose nothing."""
        return self.op in ("topk", "argmax")

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.text}"


def choices_spelled(module: nn.Module) -> tuple[Mention, ...]:
    """Where the forward of `module` itself, or a function that is its attribute, names a choice; its children left out."""
    owner: Any = type(module)
    state = vars(module)
    functions = [value for value in state.values() if type(value) in _FUNCTIONS]
    if "forward" not in state:
        functions.append(owner.forward)
    return tuple(mention for function in functions for mention in _scan(owner, getattr(function, "__func__", function)))


_FUNCTIONS = {types.FunctionType, types.MethodType}


def _scan(owner: Any, function: object) -> tuple[Mention, ...]:
    start = function if type(function) is types.FunctionType else undecorated(function)
    return () if start is None else _scan_function(owner, start)


@functools.lru_cache(maxsize=4096)
def _scan_function(owner: Hashable, start: types.FunctionType) -> tuple[Mention, ...]:
    forward = undecorated(start) or start
    found: dict[Mention, None] = {}
    seen: set[types.CodeType] = set()
    pending = [(forward, 0)]
    while pending:
        function, depth = pending.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        for code in _nested(function.__code__):
            if CHOICE_OPS.intersection(code.co_names):
                found |= dict.fromkeys(_mentions(code, function.__module__))
            if depth < _MAX_CALLS:
                pending += [(called, depth + 1) for called in _called(code, owner, function)]
    return tuple(found)


def _called(code: types.CodeType, owner: Any, function: types.FunctionType) -> Iterator[types.FunctionType]:
    for name in code.co_names:
        methods = [] if name in _MACHINERY else [vars(base)[name] for base in owner.__mro__ if name in vars(base)]
        if "super" not in code.co_names:
            methods = methods[:1]
        for candidate in (*methods, function.__globals__.get(name)):
            called = undecorated(candidate)
            if called is not None and (called.__module__ or "").split(".")[0] != "torch":
                yield called
    for cell in function.__closure__ or ():  # a decorator that leaves no `__wrapped__` keeps the function here
        with contextlib.suppress(ValueError):  # an empty cell
            if isinstance(cell.cell_contents, types.FunctionType):
                yield cell.cell_contents


_MACHINERY = frozenset(dir(nn.Module)) - {"forward"}


def _mentions(code: types.CodeType, module: str) -> Iterator[Mention]:
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        if instruction.argval in CHOICE_OPS and "NAME" not in instruction.opname:
            yield Mention(str(instruction.argval), module, line, linecache.getline(code.co_filename, line).strip())


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def undecorated(value: object) -> types.FunctionType | None:
    """The Python function behind a function, method, static or class method; runs no code of what it looks at."""
    for _ in range(16):
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
            continue
        wrapped = inspect.getattr_static(value, "__wrapped__", None)
        if wrapped is None:
            break
        value = wrapped
    return value if isinstance(value, types.FunctionType) else None
