"""How the tensors of experts may be laid out: every way in which shapes allow them to be gate, up and down projections.

In: shapes of the parameters, number of experts, hidden size. Out: `Layout`s, and the projections of one expert under a layout. Shapes
alone leave several; numbers decide (`_reading`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runner.specs import ExpertTensor, Half

_PAIRS: tuple[tuple[Half, ...], ...] = (("gate", "up"), ("up", "gate"))


@dataclass(frozen=True, slots=True)
class Layout:
    """One reading of the tensors. `intermediate`: features of an expert between its projections."""

    tensors: tuple[ExpertTensor, ...]
    intermediate: int
    gated: bool


def of_expert(value: Tensor, tensor: ExpertTensor, expert: int, experts: int) -> Tensor:
    """The matrix [out, in], or the bias [out], of one expert; a view."""
    if tensor.packed:
        value = value.view(experts, value.shape[0] // experts, *value.shape[1:])
    one = value[expert] if tensor.expert is None else value
    return one.transpose(0, 1) if tensor.transposed else one


def halves(value: Tensor, tensor: ExpertTensor) -> tuple[Tensor, ...]:
    """The projections in a matrix or bias, along its output features; views."""
    if len(tensor.halves) == 1:
        return (value,)
    if tensor.interleaved:
        return value[0::2], value[1::2]
    size = value.shape[0] // 2
    return value[:size], value[size:]


def layouts(shapes: Mapping[str, torch.Size], experts: int, hidden: int) -> Iterator[Layout]:
    """Every layout in which each tensor has one meaning and none is left over."""
    packed = {name: _is_packed(shape, experts) for name, shape in shapes.items()}
    matrices = [name for name, shape in shapes.items() if len(shape) == 3 or packed[name]]
    biases = [name for name in shapes if name not in matrices]
    if any(len(shapes[name]) != 2 or shapes[name][0] != experts for name in biases) or len(matrices) not in (2, 3):
        return
    one = {name: _one_expert(shapes[name], experts) for name in matrices}
    for order in itertools.permutations(matrices):
        for flips in itertools.product((False, True), repeat=len(order)):
            sizes = [one[name][::-1] if flip else one[name] for name, flip in zip(order, flips, strict=True)]
            for weights, intermediate, gated in _meanings(order, flips, sizes, hidden, packed):
                for rest in _biases(biases, shapes, weights, intermediate, hidden):
                    yield Layout((*weights, *rest), intermediate, gated)


def _is_packed(shape: torch.Size, experts: int) -> bool:
    return len(shape) == 2 and shape[0] != experts and shape[0] % experts == 0


def _one_expert(shape: torch.Size, experts: int) -> tuple[int, int]:
    return (shape[0] // experts, shape[1]) if len(shape) == 2 else (shape[1], shape[2])


def _meanings(
    order: tuple[str, ...],
    flips: tuple[bool, ...],
    sizes: list[tuple[int, int]],
    hidden: int,
    packed: Mapping[str, bool],
) -> Iterator[tuple[tuple[ExpertTensor, ...], int, bool]]:
    """Input projections in `order`, then the output projection; sizes are (out, in)."""

    def tensor(index: int, halves: tuple[Half, ...], interleaved: bool = False) -> ExpertTensor:
        name = order[index]
        return ExpertTensor(name, halves, transposed=flips[index], interleaved=interleaved, packed=packed[name])

    *firsts, (out, inner) = sizes
    if out != hidden or any(source != hidden for _, source in firsts):
        return
    down = tensor(len(firsts), ("down",))
    if len(firsts) == 2:
        if all(rows == inner for rows, _ in firsts):
            yield (tensor(0, ("gate",)), tensor(1, ("up",)), down), inner, True
    elif firsts[0][0] == 2 * inner:
        for pair in _PAIRS:
            for interleaved in (False, True):
                yield (tensor(0, pair, interleaved), down), inner, True
    elif firsts[0][0] == inner:
        yield (tensor(0, ("up",)), down), inner, False


def _biases(
    names: list[str], shapes: Mapping[str, torch.Size], weights: tuple[ExpertTensor, ...], inner: int, hidden: int
) -> Iterator[tuple[ExpertTensor, ...]]:
    """Each bias goes with one of the projections, laid out along the output features as that is."""
    for order in itertools.permutations(weights, len(names)) if names else [()]:
        found = []
        for name, weight in zip(names, order, strict=True):
            rows = hidden if weight.halves == ("down",) else inner * len(weight.halves)
            if shapes[name][1] != rows:
                break
            found.append(ExpertTensor(name, weight.halves, interleaved=weight.interleaved, bias=True))
        else:
            yield tuple(found)
