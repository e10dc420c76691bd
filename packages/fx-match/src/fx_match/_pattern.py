"""The pattern algebra: small immutable objects that operators and calls put together.

    gated = linear("down")(act("silu", "kind")(linear("gate")(any_value("x"))) * linear("up")(any_value("x")))

A pattern describes the expression that computes a value, from its result inwards. The same capture name twice means the
same value twice. `a * b` and the other commutative operations match in either order, `p | q` either pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx

from fx_match._canonical import CASTS, VIEWS, canonical, cast_dtype, is_number
from fx_match._errors import PatternError
from fx_match._state import Run, State
from fx_match._subject import Subject

Condition = Callable[[Any, Subject], "bool | str"]
"""Of a matched node or constant and the subject: True, or False or the reason why not."""


class Pattern:
    """Base of all patterns. Build them with the functions of this package, and combine them with operators."""

    __slots__ = ()

    def match(self, value: Any, state: State, run: Run) -> Iterator[State]:
        """Each way in which `value`, a node or a constant argument, fits, as the state extended by it."""
        raise NotImplementedError

    def named(self, name: str) -> Pattern:
        """Capture what this pattern matches under `name`."""
        return capture(name, self)

    def where(self, condition: Condition, reason: str = "a condition does not hold") -> Pattern:
        """Match only what `condition(value, subject)` is true for; `reason`, or a str that it returns, is why not."""
        return _Where(self, condition, reason)

    def single_use(self) -> Pattern:
        """Match only if every user of the node lies inside the whole match."""
        return _SingleUse(self)

    def contained(self) -> Pattern:
        """Match only if no node between this one and the captured inputs is used outside the whole match.

        What the pattern itself names a boundary may escape: the node that it matches, and nodes matched by `any_value`.
        """
        return _Contained(self)

    def __or__(self, other: Pattern) -> Pattern:
        return _Either((*_alternatives(self), *_alternatives(other)))

    def __add__(self, other: object) -> Pattern:
        return _operation("add", self, other)

    def __radd__(self, other: object) -> Pattern:
        return _operation("add", other, self)

    def __sub__(self, other: object) -> Pattern:
        return _operation("sub", self, other)

    def __rsub__(self, other: object) -> Pattern:
        return _operation("sub", other, self)

    def __mul__(self, other: object) -> Pattern:
        return _operation("mul", self, other)

    def __rmul__(self, other: object) -> Pattern:
        return _operation("mul", other, self)

    def __truediv__(self, other: object) -> Pattern:
        return _operation("div", self, other)

    def __rtruediv__(self, other: object) -> Pattern:
        return _operation("div", other, self)

    def __pow__(self, other: object) -> Pattern:
        return _operation("pow", self, other)

    def __matmul__(self, other: object) -> Pattern:
        return _operation("matmul", self, other)

    def __neg__(self) -> Pattern:
        return _operation("neg", self)


def as_pattern(value: object) -> Pattern:
    """Patterns as they are, anything else as the constant that it is."""
    return value if isinstance(value, Pattern) else const(value)


def _operation(name: str, *operands: object) -> Pattern:
    from fx_match._nodes import op  # the node patterns are built on this module

    return op(name)(*operands)


def _alternatives(pattern: Pattern) -> tuple[Pattern, ...]:
    return pattern.patterns if isinstance(pattern, _Either) else (pattern,)


@dataclass(frozen=True, slots=True)
class _Any(Pattern):
    def match(self, value: Any, state: State, run: Run) -> Iterator[State]:
        yield state.step()


@dataclass(frozen=True, slots=True)
class _Capture(Pattern):
    name: str
    pattern: Pattern

    def match(self, value: Any, state: State, run: Run) -> Iterator[State]:
        if self.name in state.captures and not _same(state.captures[self.name], value):
            run.fail(state, value, f"{self.name!r} is already {_show(state.captures[self.name])}")
            return
        for matched in self.pattern.match(value, state, run):
            if self.name in matched.captures and not _same(matched.captures[self.name], value):
                run.fail(matched, value, f"{self.name!r} is already {_show(matched.captures[self.name])}")
                continue
            yield matched.capture(self.name, value)


def _same(left: object, right: object) -> bool:
    if isinstance(left, fx.Node) or isinstance(right, fx.Node):
        return left is right
    return type(left) is type(right) and left == right


def _show(value: object) -> str:
    return value.name if isinstance(value, fx.Node) else repr(value)


@dataclass(frozen=True, slots=True)
class _Either(Pattern):
    patterns: tuple[Pattern, ...]

    def match(self, value: Any, state: State, run: Run) -> Iterator[State]:
        for pattern in self.patterns:
            yield from pattern.match(value, state, run)


@dataclass(frozen=True, slots=True)
class _Const(Pattern):
    value: object

    def match(self, value: Any, state: State, run: Run) -> Iterator[State]:
        found = run.constant(value)
        if is_number(self.value) and is_number(found):
            equal = bool(found == self.value)
        else:
            equal = type(found) is type(self.value) and bool(found == self.value)
        if equal:
            yield state.cover(value)
        else:
            run.fail(state, value, f"expected the constant {self.value!r}, found {_show(value)}")


@dataclass(frozen=True, slots=True)
class _Scalar(Pattern):
    def match(self, value: Any, state: State, run: Run) -> Iterator[State]:
        if is_number(run.constant(value)):
            yield state.cover(value)
        else:
            run.fail(state, value, f"expected a number, found {_show(value)}")


@dataclass(frozen=True, slots=True)
class _Where(Pattern):
    pattern: Pattern
    condition: Condition
    reason: str

    def match(self, value: Any, state: State, run: Run) -> Iterator[State]:
        for matched in self.pattern.match(value, state, run):
            answer = self.condition(value, run.subject)
            if answer is True:
                yield matched
            else:
                run.fail(matched, value, answer if isinstance(answer, str) else self.reason)


@dataclass(frozen=True, slots=True)
class _SingleUse(Pattern):
    pattern: Pattern

    def match(self, value: Any, state: State, run: Run) -> Iterator[State]:
        for matched in self.pattern.match(value, state, run):
            yield matched.confine(value)


@dataclass(frozen=True, slots=True)
class _Contained(Pattern):
    pattern: Pattern

    def match(self, value: Any, state: State, run: Run) -> Iterator[State]:
        before = set(state.covered)
        for matched in self.pattern.match(value, state, run):
            inner = [node for node in matched.covered if node not in before and node is not value]
            yield matched.confine(*(node for node in inner if node.op not in ("placeholder", "get_attr")))


@dataclass(frozen=True, slots=True)
class _Transparent(Pattern):
    """`pattern`, seen through any number of operations that pass their first operand on."""

    pattern: Pattern
    names: frozenset[str]

    def match(self, value: Any, state: State, run: Run) -> Iterator[State]:
        yield from self.pattern.match(value, state, run)
        while isinstance(value, fx.Node) and canonical(value) in self.names and _keeps_numbers(value):
            operand = run.first_operand(value)
            if not isinstance(operand, fx.Node):
                return
            state = state.cover(value)
            value = operand
            yield from self.pattern.match(value, state, run)


def _keeps_numbers(node: fx.Node) -> bool:
    """A cast to an integer type drops fractions: it is never looked through."""
    if canonical(node) != "cast":
        return True
    dtype = cast_dtype(node)
    return dtype is not None and dtype.is_floating_point


class Template(Protocol):
    """A pattern that takes its operands by being called: `op("cast")`, `linear()`, `module(nn.Dropout)`."""

    def __call__(self, *operands: object) -> Pattern: ...


def any_value(name: str | None = None) -> Pattern:
    """Any node or constant; where the pattern ends and the rest of the graph begins."""
    return _Any() if name is None else capture(name, _Any())


def capture(name: str, pattern: object = None) -> Pattern:
    """What `pattern` matches, under `name`; any value without a pattern."""
    if not name:
        raise PatternError("a capture needs a name")
    return _Capture(name, _Any() if pattern is None else as_pattern(pattern))


def const(value: object) -> Pattern:
    """A constant equal to `value`: a Python constant in the graph, or a 0-dimensional tensor whose data is known."""
    return _Const(value)


def scalar(name: str | None = None) -> Pattern:
    """Any number that is a constant in the graph; captured as the argument that stands there."""
    return _Scalar() if name is None else capture(name, _Scalar())


def opt(template: Template) -> Callable[[object], Pattern]:
    """`opt(template)(x)` is `template(x) | x`: an operation that may be there or not."""

    def optional(inner: object) -> Pattern:
        return template(inner) | as_pattern(inner)

    return optional


def transparent(pattern: object, names: frozenset[str] | set[str] = CASTS | VIEWS) -> Pattern:
    """`pattern`, or operations with these canonical names around it (the default: casts and views).

    The operations that are skipped belong to the match, and are not checked; only casts must be to a floating type.
    """
    return _Transparent(as_pattern(pattern), frozenset(names))
