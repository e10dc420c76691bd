"""Which attributes the code of a forward may set, whatever path it takes.

In: a class and the code of its forward. Out: names. Looked at are the forward, functions within it, and the methods, properties and
functions of its module that it names, theirs included; what torch itself does is left out.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

_OPAQUE = ("torch.", "transformers.utils", "builtins", "functools")
_STORES = frozenset({"STORE_ATTR", "DELETE_ATTR"})
_BY_NAME = frozenset({"setattr", "delattr", "__setattr__", "__delattr__"})


def stored_names(cls: type, function: types.FunctionType) -> frozenset[str]:
    """Names of attributes, of whatever object, that are set or deleted; strings too where the code sets attributes by name."""
    found: set[str] = set()
    seen: set[types.CodeType] = set()
    stack: list[tuple[types.CodeType, dict[str, Any]]] = [(function.__code__, function.__globals__)]
    while stack:
        code, scope = stack.pop()
        if code in seen:
            continue
        seen.add(code)
        found |= _stored(code)
        stack += [(inner, scope) for inner in code.co_consts if isinstance(inner, types.CodeType)]
        stack += [
            (reached.__code__, reached.__globals__) for name in code.co_names for reached in _meant(cls, scope, name)
        ]
    return frozenset(found)


@functools.lru_cache(maxsize=4096)
def _stored(code: types.CodeType) -> frozenset[str]:
    names = {str(step.argval) for step in dis.get_instructions(code) if step.opname in _STORES}
    if not _BY_NAME.isdisjoint(code.co_names):
        names |= set(_strings(code.co_consts))
    return frozenset(names)


def _strings(constants: Iterable[object]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from _strings(constant)


def _meant(cls: type, scope: dict[str, Any], name: str) -> Iterator[types.FunctionType]:
    """Python functions that a name may mean: a method or property of the class, or a global."""
    held = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
    for value in (*held, scope.get(name)):
        function = (
            getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", None) or value
        )
        while isinstance(function, types.FunctionType):
            if not f"{function.__module__}.".startswith(_OPAQUE):
                yield function
            function = getattr(function, "__wrapped__", None)
