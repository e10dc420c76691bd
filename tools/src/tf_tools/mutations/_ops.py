"""See, and replace, single operations of a running model by who runs them.

A `TorchFunctionMode` sees every torch call; forward hooks say in which module it happens. So an operation is named by
its owner (the innermost running module), its kind and its turn, whatever the model's source looks like.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

NOT_HANDLED = object()


@dataclass(frozen=True, slots=True)
class Op:
    """One call of a torch function while a module runs.

    Attributes:
        owner: qualified name of the innermost running module; "" is the head model itself.
        kind: the function's name without underscores: "add" for `a + b`, `a.add(b)`, `a += b`.
        turn: how many of this kind the owner made before in this call of it.
        function, args, kwargs: the call.
    """

    owner: str
    kind: str
    turn: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self) -> Any:
        return self.function(*self.args, **self.kwargs)


OpHandler = Callable[[Op], Any]
"""Returns a value to use in place of the call's own, or `NOT_HANDLED`."""

_SPELLINGS = {"iadd": "add", "radd": "add", "imul": "mul", "rmul": "mul", "truediv": "div", "itruediv": "div"}


@dataclass(slots=True)
class _Frame:
    owner: str
    turns: Counter[str] = field(default_factory=Counter)


class _Mode(TorchFunctionMode):
    def __init__(self, stack: list[_Frame], handler: OpHandler) -> None:
        super().__init__()
        self._stack = stack
        self._handler = handler

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._stack:
            return func(*args, **kwargs)
        frame = self._stack[-1]
        name = getattr(func, "__name__", "").strip("_")
        kind = _SPELLINGS.get(name, name)
        op = Op(frame.owner, kind, frame.turns[kind], func, tuple(args), kwargs)
        frame.turns[kind] += 1
        result = self._handler(op)
        return func(*args, **kwargs) if result is NOT_HANDLED else result


@contextlib.contextmanager
def handling(model: nn.Module, handler: OpHandler) -> Iterator[None]:
    """While active, every torch call made inside a forward of `model` goes through `handler`."""
    stack: list[_Frame] = []
    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(_enter(stack, name), prepend=True).remove)
            hooks.callback(module.register_forward_hook(_leave(stack), always_call=True).remove)
        with _Mode(stack, handler):
            yield


def _enter(stack: list[_Frame], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        stack.append(_Frame(name))

    return hook


def _leave(stack: list[_Frame]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    return hook


def replace_op(
    model: nn.Module, owner: str, kind: str, replacement: Callable[[Op], Any], *, turn: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """While active, the owner's calls of this kind (or only its `turn`-th) give what `replacement` returns."""

    def handler(op: Op) -> Any:
        if op.owner != owner or op.kind != kind or (turn is not None and op.turn != turn):
            return NOT_HANDLED
        return replacement(op)

    return handling(model, handler)


def first_operand(op: Op) -> Any:
    """The tensor that an element-wise call works on: what is left when the call is dropped."""
    return next(a for a in (*op.args, *op.kwargs.values()) if isinstance(a, Tensor))


def is_scalar(value: object) -> bool:
    """A Python number, or a tensor of one element: a scale or an offset rather than data."""
    if isinstance(value, (int, float)):
        return not isinstance(value, bool)
    return isinstance(value, Tensor) and value.numel() == 1 and not isinstance(value, torch.nn.Parameter)
