"""Numbers that came from a tensor's shape, and remember it.

`x.shape[1] // 2 == 4` holds for the tensor at hand; it is no fact about the module. So a size read from a tensor is an
`int` (or, after a division, a `float`) that knows the graph node it stands for: arithmetic on it becomes nodes, and a
comparison, a truth test, a loop count or a conversion to a plain number becomes a guard. The rest of Python and torch
takes it for the plain number that it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

from torch import fx

Number = int | float


class SizeRecorder(Protocol):
    """What a size needs of the trace that it belongs to."""

    active: bool

    @property
    def flow(self) -> object: ...

    def size_arithmetic(self, function: Callable[..., Any], operands: tuple[Any, ...], value: Number) -> Any: ...

    def size_guard(self, expr: str, value: object, outcome: bool | None) -> None: ...


class Size:
    """The provenance that `SizeInt` and `SizeFloat` share. `make_node` gives the node, which exists once it is used."""

    recorder: SizeRecorder
    make_node: Callable[[], fx.Node]
    expr: str

    @property
    def plain(self) -> Number:
        raise NotImplementedError

    def is_of(self, flow: object) -> bool:
        """Whether the size belongs to this dataflow, and not to another trace's."""
        return self.recorder.flow is flow

    def __copy__(self) -> Number:
        return self.plain

    def __deepcopy__(self, memo: object) -> Number:
        return self.plain

    def __reduce__(self) -> Any:
        return type(self.plain), (self.plain,)


class SizeInt(Size, int):
    """An int read from a shape, or computed from such."""

    __hash__ = int.__hash__

    @property
    def plain(self) -> int:
        return int.__pos__(self)


class SizeFloat(Size, float):
    """A float computed from a `SizeInt`."""

    __hash__ = float.__hash__

    @property
    def plain(self) -> float:
        return float.__pos__(self)


def make_size(value: Number, recorder: SizeRecorder, make_node: Callable[[], fx.Node], expr: str) -> Any:
    """A number equal to `value` with its provenance."""
    size: Any = SizeInt(value) if isinstance(value, int) else SizeFloat(value)
    size.recorder, size.make_node, size.expr = recorder, make_node, expr
    return size


def plain(value: Any) -> Any:
    """`value` without provenance, if it has any."""
    return value.plain if isinstance(value, Size) else value


def describe(value: Any) -> str:
    return value.expr if isinstance(value, Size) else repr(value)


_ARITHMETIC = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "floordiv": "//",
    "truediv": "/",
    "mod": "%",
    "pow": "**",
}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _binary(name: str, reflected: bool) -> Callable[[Any, Any], Any]:
    function = getattr(operator, name)

    def method(self: Size, other: Any) -> Any:
        if isinstance(other, (tuple, list, str)) and name == "mul":  # [item] * n: a length, so n is fixed here
            if self.recorder.active:
                self.recorder.size_guard(self.expr, self.plain, None)
            return other * int(self.plain)
        if not isinstance(other, (int, float)):
            return NotImplemented
        left, right = (other, self) if reflected else (self, other)
        value = function(plain(left), plain(right))
        if not self.recorder.active or not isinstance(value, (int, float)):
            return value
        return self.recorder.size_arithmetic(function, (left, right), value)

    return method


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    function, symbol = getattr(operator, name), _COMPARISONS[name]

    def method(self: Size, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        outcome = function(self.plain, plain(other))
        if self.recorder.active:
            self.recorder.size_guard(f"{self.expr} {symbol} {describe(other)}", self.plain, outcome)
        return outcome

    return method


def _fixed(convert: Callable[..., Any]) -> Callable[[Any], Any]:
    """A conversion to a plain number: the value goes on without its provenance, so it is a guard with no outcome."""

    def method(self: Size, *args: Any) -> Any:
        if self.recorder.active:
            self.recorder.size_guard(self.expr, self.plain, None)
        return convert(self.plain, *args)

    return method


def _truth(self: Size) -> bool:
    outcome = bool(self.plain)
    if self.recorder.active:
        self.recorder.size_guard(self.expr, self.plain, outcome)
    return outcome


def _negative(self: Size) -> Any:
    value = -self.plain
    return self.recorder.size_arithmetic(operator.neg, (self,), value) if self.recorder.active else value


def _integer_fixed(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    function: Any = divmod if name == "divmod" else getattr(operator, f"__{name}__")
    return (
        _fixed(lambda value, other: function(value, plain(other))),
        _fixed(lambda value, other: function(plain(other), value)),
    )


def _methods() -> dict[str, Callable[..., Any]]:
    methods: dict[str, Callable[..., Any]] = {"bool": _truth, "neg": _negative}
    for name in _ARITHMETIC:
        methods[name] = _binary(name, reflected=False)
        methods[f"r{name}"] = _binary(name, reflected=True)
    for name in _COMPARISONS:
        methods[name] = _comparison(name)
    conversions: dict[str, Callable[..., Any]] = {"int": int, "float": float, "round": round, "abs": abs}
    conversions |= {"trunc": math.trunc, "floor": math.floor, "ceil": math.ceil}
    return methods | {name: _fixed(convert) for name, convert in conversions.items()}


for _class in (SizeInt, SizeFloat):
    for _name, _method in _methods().items():
        setattr(_class, f"__{_name}__", _method)
for _name in ("divmod", "lshift", "rshift", "and", "or", "xor"):
    _forward, _reflected = _integer_fixed(_name)
    setattr(SizeInt, f"__{_name}__", _forward)
    setattr(SizeInt, f"__r{_name}__", _reflected)


def size_expression(function: Callable[..., Any], operands: tuple[Any, ...]) -> str:
    """The text of arithmetic on sizes, for guards."""
    if len(operands) == 1:
        return f"-{describe(operands[0])}"
    symbol = _ARITHMETIC.get(function.__name__, function.__name__)
    return f"({describe(operands[0])} {symbol} {describe(operands[1])})"


class _RangeType(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, range)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, range)


class GuardedRange(metaclass=_RangeType):
    """Stands in for `range` in a module's globals while it is traced: `range` takes a size without asking it anything."""

    def __new__(cls, *args: Any) -> Any:
        for arg in args:
            if isinstance(arg, Size) and arg.recorder.active:
                arg.recorder.size_guard(arg.expr, arg.plain, None)
        return range(*(plain(arg) for arg in args))
