"""Which modules can choose at all: whether the code behind a forward spells a top-k. Cheap, and cached by function.

In: a module. Out: the places in its forward, and in the functions and methods that it calls, at which an operation is
named that can choose (`CHOICE_OPS`). This only tells where a trace is worth its time, and stands in for one where a module
was never called.
"""

from __future__ import annotations

import dis
import functools
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
    """Where the forward of `module` itself, its children left out, names a choice."""
    own = module.__dict__.get("forward")
    forward = _function(own if own is not None else type(module).forward)
    owner: Any = type(module)
    return () if forward is None else _scan(owner, forward)


@functools.lru_cache(maxsize=4096)
def _scan(owner: Hashable, forward: types.FunctionType) -> tuple[Mention, ...]:
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
            called = _function(candidate)
            if called is not None and (called.__module__ or "").split(".")[0] != "torch":
                yield called


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


def _function(value: object) -> types.FunctionType | None:
    """The undecorated Python function behind a function, method, static or class method."""
    for _ in range(16):
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        elif hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        else:
            break
    return value if isinstance(value, types.FunctionType) else None
