"""Code that a forward may reach, beside its own text: methods, properties and functions of its module, whatever path leads there.

In: a trace. Out: the function that names a child of the module, if one does. Looked at where the trace shows one path of several: on
another one such a function would find the child gone.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from fx_match import Trace
from torch import nn

_OPAQUE = ("torch.", "transformers.utils", "builtins", "functools")


def mention_elsewhere(trace: Trace, child: str) -> str | None:
    """Qualified name of a function that names `child` as an attribute or in a string; None if none does.

    The forward itself is looked at for strings alone: its text is known, and what it names there is for the caller to judge.
    """
    seen: set[types.CodeType] = set()
    stack: list[tuple[types.CodeType, dict[str, Any]]] = [(trace.code, _globals(trace.module_class))]
    while stack:
        code, scope = stack.pop()
        if code in seen:
            continue
        seen.add(code)
        is_forward = code is trace.code or (code.co_filename, code.co_firstlineno) == _place(trace.code)
        names = set() if is_forward else set(code.co_names)
        if child in names or child in _strings(code):
            return code.co_qualname
        stack += [(inner, scope) for inner in code.co_consts if isinstance(inner, types.CodeType)]
        for name in code.co_names:
            for function in _functions(trace.module_class, scope, name):
                stack.append((function.__code__, function.__globals__))
    return None


def _place(code: types.CodeType) -> tuple[str, int]:
    return code.co_filename, code.co_firstlineno


def _globals(cls: type[nn.Module]) -> dict[str, Any]:
    forward = getattr(cls.forward, "__wrapped__", cls.forward)
    found: dict[str, Any] = getattr(forward, "__globals__", {})
    return found


def _strings(code: types.CodeType) -> set[str]:
    found, stack = set(), list(code.co_consts)
    while stack:
        constant = stack.pop()
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, tuple | frozenset):
            stack.extend(constant)
    return found


def _functions(cls: type[nn.Module], scope: dict[str, Any], name: str) -> Iterator[types.FunctionType]:
    """Python functions that `name` may mean: a method or property of the class or of a base of it, or a global."""
    held = [vars(base)[name] for base in cls.__mro__ if name in vars(base) and base.__module__[:6] != "torch."]
    for value in (*held, scope.get(name)):
        for function in _unwrapped(value):
            if not function.__module__.startswith(_OPAQUE):
                yield function


def _unwrapped(value: Any) -> Iterator[types.FunctionType]:
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    elif isinstance(value, classmethod | staticmethod):
        value = value.__func__
    while isinstance(value, types.FunctionType):
        yield value
        value = getattr(value, "__wrapped__", None)
