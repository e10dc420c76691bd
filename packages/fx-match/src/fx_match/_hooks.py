"""The hooks that a trace puts into the process, and takes out again whatever happens.

Three things cannot be seen from tensors alone: the call of a child module, the read of a module's attribute, and the call
of a plain Python function that the caller named a leaf. For the first two `nn.Module` gets hooks while at least one
trace runs; for the third the function's code object is exchanged, so that it does not matter through which name,
registry or closure the function was reached. All hooks ask for the trace of the current thread and
step aside where there is none, so that other threads see nothing.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn

from fx_match._sizes import GuardedRange


class HookReceiver(Protocol):
    """What the hooks need of a running trace."""

    @property
    def active(self) -> bool: ...

    def is_leaf_module(self, module: nn.Module) -> bool: ...

    def call_leaf_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def call_leaf_function(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...

    def attribute_read(self, module: nn.Module, name: str, value: object) -> None: ...

    def attribute_missed(self, module: nn.Module, name: str) -> None: ...


class _Current(threading.local):
    receiver: HookReceiver | None = None


_current = _Current()
_lock = threading.RLock()
_installed = 0
_original_call: Any = None


@contextlib.contextmanager
def receiving(receiver: HookReceiver | None) -> Iterator[None]:
    """Make `receiver` the trace of this thread."""
    previous, _current.receiver = _current.receiver, receiver
    try:
        yield
    finally:
        _current.receiver = previous


@contextlib.contextmanager
def module_hooks() -> Iterator[None]:
    """Hook calls and attribute reads of every `nn.Module` while at least one trace is inside."""
    global _installed, _original_call
    with _lock:
        _installed += 1
        if _installed == 1:
            _original_call = nn.Module.__call__
            setattr(nn.Module, "__call__", _call)  # noqa: B010 - mypy takes the plain spelling for a mistake
            setattr(nn.Module, "__getattribute__", _getattribute)  # noqa: B010
    try:
        yield
    finally:
        with _lock:
            _installed -= 1
            if _installed == 0:
                setattr(nn.Module, "__call__", _original_call)  # noqa: B010
                delattr(nn.Module, "__getattribute__")


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    receiver = _current.receiver
    if receiver is not None and receiver.active and receiver.is_leaf_module(self):
        return receiver.call_leaf_module(self, args, kwargs)
    return original_module_call()(self, *args, **kwargs)


def original_module_call() -> Any:
    """`nn.Module.__call__` as it is when no trace runs."""
    return _original_call if _original_call is not None else nn.Module.__call__


def _getattribute(self: nn.Module, name: str) -> Any:
    receiver = _current.receiver
    if receiver is None or not receiver.active or name.startswith("__"):
        return object.__getattribute__(self, name)
    try:
        value = object.__getattribute__(self, name)
    except AttributeError:
        receiver.attribute_missed(self, name)
        raise
    receiver.attribute_read(self, name, value)
    return value


@contextlib.contextmanager
def function_hooks(functions: list[types.FunctionType]) -> Iterator[None]:
    """Send calls of these Python functions, made in this thread's trace, to its `call_leaf_function`."""
    with contextlib.ExitStack() as stack:
        for function in functions:
            stack.enter_context(_function_hook(function))
        yield


_hooked: dict[types.FunctionType, tuple[int, types.CodeType]] = {}


@contextlib.contextmanager
def _function_hook(function: types.FunctionType) -> Iterator[None]:
    with _lock:
        count, code = _hooked.get(function, (0, function.__code__))
        _hooked[function] = (count + 1, code)
        if count == 0:
            function.__code__ = _trampoline(function)
    try:
        yield
    finally:
        with _lock:
            count, code = _hooked[function]
            if count == 1:
                function.__code__ = code
                del _hooked[function]
            else:
                _hooked[function] = (count - 1, code)


def _trampoline(function: types.FunctionType) -> types.CodeType:
    """Code with the free variables of `function` that hands every call to the receiver of the calling thread."""
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = function.__kwdefaults__

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        receiver = _current.receiver
        if receiver is not None and receiver.active:
            return receiver.call_leaf_function(function, args, kwargs)
        return original(*args, **kwargs)

    free = function.__code__.co_freevars
    lines = ["def outer():", *(f"    {name} = None" for name in free)]
    lines += ["    def trampoline(*args, **kwargs):", *(f"        {name}" for name in free)]
    lines += ["        dispatch = 'DISPATCH'", "        return dispatch(*args, **kwargs)"]
    namespace = compile("\n".join(lines), __file__, "exec")
    outer = next(c for c in namespace.co_consts if isinstance(c, types.CodeType))
    inner = next(c for c in outer.co_consts if isinstance(c, types.CodeType))
    constants = tuple(dispatch if constant == "DISPATCH" else constant for constant in inner.co_consts)
    return inner.replace(co_consts=constants, co_name=function.__code__.co_name)


_ranges: dict[int, int] = {}


@contextlib.contextmanager
def guarded_range(namespace: dict[str, Any]) -> Iterator[None]:
    """Let `range` in a module's globals record the sizes that it is given; a `range` of the module's own is kept."""
    with _lock:
        count = _ranges.get(id(namespace), 0)
        ours = count > 0 or "range" not in namespace
        if ours:
            _ranges[id(namespace)] = count + 1
            namespace["range"] = GuardedRange
    try:
        yield
    finally:
        with _lock:
            if ours:
                _ranges[id(namespace)] -= 1
                if _ranges[id(namespace)] == 0:
                    del _ranges[id(namespace)]
                    namespace.pop("range", None)
