"""Patterns for one node and its operands: operations, child modules, linears, calls, parameters, placeholders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fx_match._activation import ACTIVATIONS
from fx_match._arguments import Bound, bind
from fx_match._canonical import COMMUTATIVE, canonical, cast_dtype
from fx_match._errors import PatternError
from fx_match._pattern import Pattern, as_pattern
from fx_match._state import Run, State

# Arguments that say where and how a result is stored, not what it is.
_STORAGE = frozenset(
    {"_stacklevel", "non_blocking", "copy", "memory_format", "inplace", "implicit", "layout", "pin_memory"}
)
_TAKES_LIST = frozenset({"cat", "stack", "hstack", "vstack"})


class NodePattern(Pattern):
    """A pattern for one node. Called with patterns, it also matches the node's operands; uncalled, whatever they are."""

    __slots__ = ()
    operands: tuple[Pattern, ...] | None
    name: str | None

    def __call__(self, *operands: object) -> Pattern:
        return dataclasses.replace(self, operands=tuple(as_pattern(operand) for operand in operands))  # type: ignore[type-var]

    def named(self, name: str) -> NodePattern:
        """Capture the node under `name`; the result still takes operands."""
        return dataclasses.replace(self, name=name)  # type: ignore[type-var]

    def accepts(self, node: fx.Node, state: State, run: Run) -> Iterator[tuple[State, list[tuple[Any, ...]]]]:
        """If the node itself fits: the state with what is covered by that, and the possible orders of its operands."""
        raise NotImplementedError

    def match(self, value: Any, state: State, run: Run) -> Iterator[State]:
        if not isinstance(value, fx.Node):
            run.fail(state, value, f"expected {self}, found the constant {value!r}")
            return
        if self.name is not None and state.captures.get(self.name, value) is not value:
            run.fail(state, value, f"{self.name!r} is already {state.captures[self.name]}")
            return
        for accepted, orders in self.accepts(value, state, run):
            inner = accepted.cover(value)
            if self.name is not None:
                inner = inner.capture(self.name, value)
            if self.operands is None:
                yield inner
                continue
            for order in orders:
                if len(order) < len(self.operands):
                    run.fail(inner, value, f"expected {len(self.operands)} operands, found {len(order)}")
                    continue
                yield from _match_all(self.operands, order, inner, run)


def _match_all(patterns: tuple[Pattern, ...], values: tuple[Any, ...], state: State, run: Run) -> Iterator[State]:
    if not patterns:
        yield state
        return
    for matched in patterns[0].match(values[0], state, run):
        yield from _match_all(patterns[1:], values[1:], matched, run)


@dataclass(frozen=True, slots=True)
class _Op(NodePattern):
    names: frozenset[str]
    options: tuple[tuple[str, Pattern], ...]
    operands: tuple[Pattern, ...] | None = None
    name: str | None = None

    def __str__(self) -> str:
        return " or ".join(sorted(self.names))

    def accepts(self, node: fx.Node, state: State, run: Run) -> Iterator[tuple[State, list[tuple[Any, ...]]]]:
        found = canonical(node)
        if found not in self.names:
            run.fail(state, node, f"expected {self}, found {_describe(node)}")
            return
        bound = bind(node) or _positional(node)
        operands = list(bound.values.items())
        count = len(self.operands) if self.operands is not None else 0
        if found in _TAKES_LIST and operands and isinstance(operands[0][1], (tuple, list)):
            used, orders = {operands[0][0]}, [tuple(operands[0][1])]
            if self.operands is not None and len(orders[0]) != count:
                run.fail(state, node, f"expected {found} of {count} values, found {len(orders[0])}")
                return
        else:
            used, orders = {key for key, _ in operands[:count]}, [tuple(value for _, value in operands)]
            if "rsub" in str(node.target):
                orders = [(orders[0][1], orders[0][0], *orders[0][2:])]
        named = {key for key, _ in self.options}
        unnamed = sorted(bound.changed - used - named - _STORAGE - ({"device"} if found == "cast" else set()))
        if found in ("cast", "add_scaled", "sub_scaled", "floor_div", "trunc_div"):  # the name says it already
            unnamed = [key for key in unnamed if key not in ("dtype", "alpha", "rounding_mode")]
        if unnamed:
            shown = ", ".join(f"{key}={bound.values[key]}" for key in unnamed)
            run.fail(state, node, f"{found} has {shown}, which the pattern does not allow for")
            return
        if count == 2 and found in COMMUTATIVE:
            orders.append((orders[0][1], orders[0][0], *orders[0][2:]) if len(orders[0]) > 1 else orders[0])
        for matched in self._match_options(self.options, node, bound, state, run):
            yield matched, orders

    def _match_options(
        self, options: tuple[tuple[str, Pattern], ...], node: fx.Node, bound: Bound, state: State, run: Run
    ) -> Iterator[State]:
        if not options:
            yield state
            return
        key, pattern = options[0]
        if key == "dtype" and canonical(node) == "cast":
            value: Any = cast_dtype(node)
        elif key in bound.values:
            value = _nonnegative_dim(bound.values[key], node, run) if key == "dim" else bound.values[key]
        else:
            run.fail(state, node, f"{canonical(node)} has no argument named {key!r}")
            return
        if key == "dim" and isinstance(pattern, _Dim):
            pattern = pattern.against(node, run)
        for matched in pattern.match(value, state, run):
            yield from self._match_options(options[1:], node, bound, matched, run)


def _positional(node: fx.Node) -> Bound:
    """Operands of a callable whose arguments have no known names: by position; every keyword counts as changed."""
    values = {str(index): value for index, value in enumerate(node.args)} | dict(node.kwargs)
    return Bound(values, frozenset(node.kwargs))


@dataclass(frozen=True, slots=True)
class _Dim(Pattern):
    """A dim, or several, given as a pattern option: compared after negative ones are resolved."""

    dims: tuple[int, ...]

    def against(self, node: fx.Node, run: Run) -> Pattern:
        return as_pattern(_resolved(self.dims, _rank(node, run)))

    def match(self, value: Any, state: State, run: Run) -> Iterator[State]:
        yield from as_pattern(self.dims).match(value, state, run)


def _rank(node: fx.Node, run: Run) -> int | None:
    operand = run.first_operand(node)
    value = run.subject.value(operand) if isinstance(operand, fx.Node) else None
    return value.dim() if isinstance(value, torch.Tensor) else None


def _resolved(dims: tuple[int, ...], rank: int | None) -> tuple[int, ...]:
    return dims if rank is None else tuple(dim + rank if dim < 0 else dim for dim in dims)


def _nonnegative_dim(value: Any, node: fx.Node, run: Run) -> Any:
    dims = (value,) if isinstance(value, int) else value
    if not isinstance(dims, (tuple, list)) or not all(isinstance(dim, int) for dim in dims):
        return value
    return _resolved(tuple(dims), _rank(node, run))


def _describe(node: fx.Node) -> str:
    if node.op in ("placeholder", "get_attr", "call_module"):
        return f"{node.op} {node.target}"
    return canonical(node)


def op(*names: str, **options: object) -> NodePattern:
    """An operation by canonical name, or one of several: `op("mul")(a, b)`, `op("mean", dim=-1, keepdim=True)(x)`.

    Operands are matched in the order of the operation's own signature, in either order if it is commutative; for `cat`
    and `stack` they are the tensors in the list. Options match arguments by name, with a constant or a pattern, whether
    they were passed or not. Optional arguments that are neither must be at their default: what the pattern
    does not name does not change the result.
    """
    if not names:
        raise PatternError("op() needs the canonical name of an operation")
    return _Op(frozenset(names), tuple((key, _option(key, value)) for key, value in options.items()))


def _option(key: str, value: object) -> Pattern:
    if key == "dim" and isinstance(value, int):
        return _Dim((value,))
    if key == "dim" and isinstance(value, (tuple, list)):
        return _Dim(tuple(value))
    return as_pattern(value)


@dataclass(frozen=True, slots=True)
class _Module(NodePattern):
    condition: type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]
    operands: tuple[Pattern, ...] | None = None
    name: str | None = None

    def __str__(self) -> str:
        return f"a child module ({getattr(self.condition, '__name__', self.condition)})"

    def accepts(self, node: fx.Node, state: State, run: Run) -> Iterator[tuple[State, list[tuple[Any, ...]]]]:
        child = run.subject.child(node)
        if child is None or not fits(child, self.condition):
            run.fail(state, node, f"expected {self}, found {_describe(node)}")
            return
        yield state, [(*node.args, *node.kwargs.values())]


def fits(child: nn.Module, condition: Any) -> bool:
    """Whether a module is of a class, exactly, or satisfies a predicate."""
    if isinstance(condition, tuple):
        return type(child) in condition
    return type(child) is condition if isinstance(condition, type) else bool(condition(child))


def module(
    condition: type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] = lambda child: True,
    name: str | None = None,
) -> NodePattern:
    """A call of a child module: of exactly this class (or one of these), or for which the predicate is true."""
    return _Module(condition, name=name)


@dataclass(frozen=True, slots=True)
class _Linear(NodePattern):
    condition: Any
    operands: tuple[Pattern, ...] | None = None
    name: str | None = None

    def __str__(self) -> str:
        return "a linear"

    def accepts(self, node: fx.Node, state: State, run: Run) -> Iterator[tuple[State, list[tuple[Any, ...]]]]:
        child = run.subject.child(node)
        if child is not None and fits(child, self.condition):
            yield state, [(*node.args, *node.kwargs.values())]
            return
        found = _functional_linear(node)
        if found is None:
            run.fail(state, node, f"expected a linear, found {_describe(node)}")
            return
        operand, covered = found
        for part in covered:
            state = state.cover(part)
        yield state, [(operand,)]


def _functional_linear(node: fx.Node) -> tuple[Any, list[fx.Node]] | None:
    """The input of `F.linear`, or of a product with a transposed stored weight, and the nodes that belong to it."""
    name, bound = canonical(node), bind(node)
    if bound is None or name not in ("linear", "addmm", "matmul"):
        return None
    values = bound.values
    if name == "linear":
        stored = [values["weight"], *([values["bias"]] if values.get("bias") is not None else [])]
        is_stored = all(isinstance(part, fx.Node) and part.op in ("get_attr", "placeholder") for part in stored)
        return (values["input"], [part for part in stored if part.op == "get_attr"]) if is_stored else None
    if bound.changed:  # addmm(beta=..., alpha=...)
        return None
    left, right = [*values.values()][-2:] if name == "matmul" else (values.get("mat1"), values.get("mat2"))
    bias = values.get("input") if name == "addmm" else None
    if not isinstance(right, fx.Node) or canonical(right) not in ("transpose", "permute") or not right.args:
        return None
    weight = right.args[0]
    parts = [weight] if bias is None else [weight, bias]
    if not all(isinstance(part, fx.Node) and part.op in ("get_attr", "placeholder") for part in parts):
        return None
    return left, [right, *(part for part in parts if isinstance(part, fx.Node) and part.op == "get_attr")]


def linear(name: str | None = None, condition: Any = nn.Linear) -> NodePattern:
    """A linear layer: a child that is an `nn.Linear` exactly (or what `condition` says, as in `module`), `F.linear`, or
    a product with the transpose of a stored weight, as ATen graphs have it (`mm`, `addmm`)."""
    return _Linear(condition, name=name)


@dataclass(frozen=True, slots=True)
class _Call(NodePattern):
    target: Any
    operands: tuple[Pattern, ...] | None = None
    name: str | None = None

    def __str__(self) -> str:
        return f"a call of {getattr(self.target, '__name__', self.target)}"

    def accepts(self, node: fx.Node, state: State, run: Run) -> Iterator[tuple[State, list[tuple[Any, ...]]]]:
        is_call = node.op in ("call_function", "call_method")
        if not is_call or node.target not in (self.target if isinstance(self.target, tuple) else (self.target,)):
            run.fail(state, node, f"expected {self}, found {_describe(node)}")
            return
        yield state, [(*node.args, *node.kwargs.values())]


def call(target: Any, name: str | None = None) -> NodePattern:
    """A call of exactly this function (or one of a tuple), or of the method of this name.

    Operands match the leading arguments, positional ones first; the others are left for the caller to look at.
    """
    return _Call(target, name=name)


@dataclass(frozen=True, slots=True)
class _Act(NodePattern):
    kinds: frozenset[str]
    kind_name: str | None
    operands: tuple[Pattern, ...] | None = None
    name: str | None = None

    def __str__(self) -> str:
        return "an activation" if self.kinds == ACTIVATIONS else f"the activation {' or '.join(sorted(self.kinds))}"

    def accepts(self, node: fx.Node, state: State, run: Run) -> Iterator[tuple[State, list[tuple[Any, ...]]]]:
        found = run.activation(node)
        if found is None or found not in self.kinds:
            run.fail(state, node, f"expected {self}, found {found or _describe(node)}")
            return
        if self.kind_name is not None:
            if state.captures.get(self.kind_name, found) != found:
                run.fail(state, node, f"{self.kind_name!r} is already {state.captures[self.kind_name]}")
                return
            state = state.capture(self.kind_name, found)
        yield state, [(node.args[0],)]


def act(*kinds: str, kind: str | None = None, name: str | None = None) -> NodePattern:
    """A function or child module that computes one of these activations, any if none is given (see `activation`).

    kind: capture the activation's name, a str, under this; name: capture the node.
    """
    unknown = set(kinds) - ACTIVATIONS
    if unknown:
        raise PatternError(f"unknown activations {sorted(unknown)}; known are {sorted(ACTIVATIONS)}")
    return _Act(frozenset(kinds) or ACTIVATIONS - {"identity"}, kind, name=name)


@dataclass(frozen=True, slots=True)
class _State(NodePattern):
    kind: str
    target: str | None
    operands: tuple[Pattern, ...] | None = None
    name: str | None = None

    def __str__(self) -> str:
        return self.kind if self.target is None else f"{self.kind} {self.target!r}"

    def accepts(self, node: fx.Node, state: State, run: Run) -> Iterator[tuple[State, list[tuple[Any, ...]]]]:
        wanted = "placeholder" if self.kind == "placeholder" else "get_attr"
        fit = node.op == wanted and self.target in (None, str(node.target))
        if fit and self.kind == "parameter":
            fit = isinstance(run.subject.tensor(node), nn.Parameter)
        if not fit:
            run.fail(state, node, f"expected {self}, found {_describe(node)}")
            return
        yield state, [()]


def param(name: str | None = None) -> NodePattern:
    """A parameter of the traced module itself."""
    return _State("parameter", None, name=name)


def attr(target: str | None = None, name: str | None = None) -> NodePattern:
    """Any stored tensor: parameter, buffer or constant; with `target`, the one at that path."""
    return _State("attribute", target, name=name)


def placeholder(target: str | None = None, name: str | None = None) -> NodePattern:
    """An input of the graph; with `target`, the one of that name."""
    return _State("placeholder", target, name=name)
