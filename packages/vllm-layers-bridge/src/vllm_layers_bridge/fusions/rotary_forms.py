"""What a function of a model rotates, and how: told by what it computes.

In: a call of the function, traced. Out: its `Form`. The function is made of nothing but products, sums and rearrangements, so that each
entry of its result is a polynomial of what it is given: two such functions that agree on values drawn at random are the same. It is run
on drawn values of several sizes and compared with every rotation that the engine's kernel computes.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from fx_match import Trace, canonical, cast_dtype, is_inplace
from torch import fx

from vllm_layers_bridge.fusions.functions import FunctionCall
from vllm_layers_bridge.specs import Angles, Pairing

_ARRANGING = frozenset(
    {
        "mul", "add", "sub", "neg", "cat", "stack", "getitem", "chunk", "split", "narrow", "select", "unbind", "unsqueeze", "squeeze",
        "reshape", "flatten", "unflatten", "transpose", "permute", "repeat_interleave", "expand", "contiguous", "clone", "alias",
    }
)  # fmt: skip
"""Operations of which a function may be made: entries of the result are polynomials of entries of the operands."""

_TOLERANCE = 1e-4
"""Of values of order one in float32; another function differs by order one somewhere."""


class NoRotation(Exception):
    """Why a function is no rotation, as a verb phrase."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a call rotates: names are those of the function's parameters, `arguments` the nodes that they were given."""

    rotated: tuple[str, ...]
    cos: str
    sin: str
    pairing: Pairing
    angles: Angles
    token_axis: Literal[1, 2]
    arguments: Mapping[str, fx.Node]


@dataclass(frozen=True, slots=True)
class _Call:
    """Values of one call, and the function that gives its results for them."""

    called: FunctionCall
    given: Mapping[str, Any]
    rotated: tuple[str, ...]
    angles: tuple[str, str]

    def run(self, values: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            found = self.called.function(**{**self.given, **values})
        return found if isinstance(found, tuple) else (found,)


def form_of(called: FunctionCall, leaf: fx.Node, trace: Trace, spelt: Trace) -> Form:
    """The form of the call that is `leaf` in `trace`, and is spelt out in `spelt`; NoRotation where it has none."""
    _require_polynomials(called, spelt)
    arguments = _bound(called, leaf)
    nodes = {name: given for name, given in arguments.items() if isinstance(given, fx.Node)}
    shapes = {name: _shape(trace.value(node)) for name, node in nodes.items()}
    rotated = tuple(name for name, shape in shapes.items() if len(shape) == 4)
    angles = tuple(name for name, shape in shapes.items() if len(shape) == 3)
    if not rotated or len(angles) != 2 or len(rotated) + len(angles) != len(shapes):
        raise NoRotation(f"takes values of {_shown(shapes)}; expected heads, cosines and sines")
    if shapes[angles[0]] != shapes[angles[1]] or shapes[angles[0]][0] != 1:
        raise NoRotation(f"takes cosines and sines of {_shown({name: shapes[name] for name in angles})}")
    _require_results(trace, leaf, [trace.value(nodes[name]) for name in rotated])
    call = _Call(called, arguments, rotated, (angles[0], angles[1]))
    tokens, width = shapes[angles[0]][1:]
    failure = (
        f"rotates in no way that the engine's kernel does, over heads of {_shown({n: shapes[n] for n in rotated})}"
    )
    axes: tuple[Literal[1, 2], ...] = (2, 1)
    for axis in axes:
        if any(shapes[name][axis] != tokens or shapes[name][0] != 1 for name in rotated):
            continue
        samples = _samples(call, {name: shapes[name][3] for name in rotated}, width, axis)
        try:
            outcomes = [(values, call.run(values)) for values in samples]
        except Exception as error:  # the model's own code, with sizes that it may not be made for
            failure = f"does not run with other sizes: {type(error).__name__}: {error}".split("\n", 1)[0]
            continue
        for cos, sin, pairing, kind in _hypotheses(call.angles):
            if all(_agrees(call, values, found, cos, sin, pairing, kind, axis) for values, found in outcomes):
                return Form(rotated, cos, sin, pairing, kind, axis, nodes)
    raise NoRotation(failure)


def _require_polynomials(called: FunctionCall, spelt: Trace) -> None:
    for node in called.nodes:
        name = canonical(node)
        if is_inplace(node):
            raise NoRotation("writes in place")
        if not _holds_tensor(spelt.value(node)):
            continue  # a size
        dtype = cast_dtype(node) if name == "cast" else None
        if name not in _ARRANGING and (dtype is None or not dtype.is_floating_point):
            raise NoRotation(f"computes `{name}`, which no rotation needs")


def _bound(called: FunctionCall, leaf: fx.Node) -> dict[str, Any]:
    signature = inspect.signature(called.function)
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in signature.parameters.values()):
        raise NoRotation("takes arguments without a name")
    bound = signature.bind(*leaf.args, **leaf.kwargs)
    for name, given in bound.arguments.items():
        if not isinstance(given, fx.Node | int | float | str | bool | type(None)):
            raise NoRotation(f"is given a {type(given).__name__} as `{name}`")
    return dict(bound.arguments)


def _shape(value: object) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _shown(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"`{name}` {list(shape)}" for name, shape in shapes.items())


def _holds_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, tuple | list) and any(_holds_tensor(v) for v in value))


def _require_results(trace: Trace, leaf: fx.Node, rotated: list[object]) -> None:
    """One result for each value that is rotated, of its shape and type; a tuple where there are several."""
    value = trace.value(leaf)
    if type(value) is not tuple and not isinstance(value, torch.Tensor):
        raise NoRotation(f"returns a {type(value).__name__}")
    results = (value,) if isinstance(value, torch.Tensor) else value
    if (isinstance(value, tuple) and len(value) == 1) or len(results) != len(rotated):
        raise NoRotation(f"returns {len(results)} values for {len(rotated)} that it takes")
    for given, result in zip(rotated, results, strict=True):
        assert isinstance(given, torch.Tensor)
        if not isinstance(result, torch.Tensor) or (result.shape, result.dtype) != (given.shape, given.dtype):
            raise NoRotation("returns values of another shape or type than it takes")


def _samples(call: _Call, widths: Mapping[str, int], width: int, axis: int) -> Iterator[dict[str, torch.Tensor]]:
    """Drawn values of the widths of the trace, and of twice those, with other numbers of tokens and heads."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    for tokens, heads, times in ((5, (3, 2, 4), 1), (1, (2, 2, 2), 1), (4, (6, 3, 2), 2)):
        values = {name: drawn(1, tokens, times * width) for name in call.angles}
        for name, count in zip(call.rotated, itertools.cycle(heads)):
            shape = (1, count, tokens) if axis == 2 else (1, tokens, count)
            values[name] = drawn(*shape, times * widths[name])
        yield values


def _hypotheses(angles: tuple[str, str]) -> Iterator[tuple[str, str, Pairing, Angles]]:
    pairings: tuple[Pairing, ...] = ("halves", "adjacent")
    kinds: tuple[Angles, ...] = ("twice", "first half", "once")
    for cos, sin in (angles, angles[::-1]):
        for pairing, kind in itertools.product(pairings, kinds):
            yield cos, sin, pairing, kind


def _agrees(
    call: _Call,
    values: Mapping[str, torch.Tensor],
    found: tuple[torch.Tensor, ...],
    cos: str,
    sin: str,
    pairing: Pairing,
    kind: Angles,
    axis: int,
) -> bool:
    if kind != "once" and values[cos].shape[-1] % 2:
        return False
    cosines, sines = (_of_pairs(values[name].unsqueeze(3 - axis), pairing, kind) for name in (cos, sin))
    for name, result in zip(call.rotated, found, strict=True):
        part = values[name]
        turned = 2 * cosines[0].shape[-1]
        if turned > part.shape[-1] or result.shape != part.shape:
            return False
        first, second = _split(part[..., :turned], pairing)
        pair = (first * cosines[0] - second * sines[0], second * cosines[1] + first * sines[1])
        joined = torch.cat(pair, dim=-1) if pairing == "halves" else torch.stack(pair, dim=-1).flatten(-2)
        expected = torch.cat((joined, part[..., turned:]), dim=-1)
        if not torch.allclose(result.float(), expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            return False
    return True


def _of_pairs(values: torch.Tensor, pairing: Pairing, kind: Angles) -> tuple[torch.Tensor, torch.Tensor]:
    """For the first entries of all pairs, and for the second ones."""
    if kind == "twice":
        return _split(values, pairing)
    single = values if kind == "once" else values[..., : values.shape[-1] // 2]
    return single, single


def _split(values: torch.Tensor, pairing: Pairing) -> tuple[torch.Tensor, torch.Tensor]:
    if pairing == "adjacent":
        return values[..., ::2], values[..., 1::2]
    first, second = values.chunk(2, dim=-1)
    return first, second
