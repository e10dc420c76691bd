"""Where experts may lie in a module: stacked parameters or a list of like modules. From structure and shapes alone.

In: a module. Out: `Site`s, with names relative to that module. A site is a candidate: decoder layers are a list of like
modules too, so what makes a site experts is the choice that leads to it (`_recognize`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from moe_runner._block import Storage

DEPTH = 2
"""How far below a block its experts and its router lie: `experts`, or `experts.mlp`."""


@dataclass(frozen=True, slots=True)
class Site:
    """Parameters or modules that look like experts.

    name: the child that holds them all, "" for the module itself.
    num_experts: E; None where the parameters are packed as [E * rows, columns], so that only a router tells E.
    members: names of the parameters, or of the elements of a list.
    """

    name: str
    num_experts: int | None
    storage: Storage
    members: tuple[str, ...]
    parameters: tuple[str, ...]
    sizes: frozenset[int]
    """First dimensions of the parameters, or the length of the list. More than one where some tensors have rows for null experts."""

    def covers(self, path: str) -> bool:
        """Whether the child or parameter `path` is part of the site, or a child on the way to it."""
        return any(inside(path, member) or inside(member, path) for member in self.members)


def walk(module: nn.Module, depth: int = DEPTH, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """`module` and what lies at most `depth` levels below it, with relative names; elements of a list count as a level."""
    yield path, module
    if depth:
        for name, child in module._modules.items():
            if child is not None:
                yield from walk(child, depth - 1, f"{path}.{name}" if path else name)


def shape_of(parameter: nn.Parameter | None) -> tuple[int, ...]:
    """The shape; () for a parameter that is registered as None or has no shape yet."""
    lazy = isinstance(parameter, nn.UninitializedParameter)
    return () if parameter is None or lazy else tuple(parameter.shape)


def sites_in(modules: list[tuple[str, nn.Module]]) -> list[Site]:
    """What looks like experts among these modules, given with their names; of stacked parameters the most experts first."""
    return [*_stacked(modules), *_listed(modules), *_packed(modules)]


def _stacked(modules: list[tuple[str, nn.Module]]) -> Iterator[Site]:
    """Two or more parameters of rank 3 with one first dimension, or of one module: [E, rows, columns] each."""
    sizes: dict[int, list[str]] = defaultdict(list)
    owners: dict[str, dict[str, int]] = defaultdict(dict)
    for path, child in modules:
        if isinstance(child, (nn.modules.conv._ConvNd, nn.Bilinear)):  # [channels, channels, window], [out, in, in]
            continue
        for name, parameter in child._parameters.items():
            shape = shape_of(parameter)
            if len(shape) == 3 and shape[0] >= 2:
                full = f"{path}.{name}" if path else name
                sizes[shape[0]].append(full)
                owners[path][full] = shape[0]
    for size in sorted(sizes, reverse=True):
        if len(names := tuple(sizes[size])) > 1:
            yield Site(_holder(names), size, "stacked parameters", names, names, frozenset({size}))
    for path, rows in owners.items():
        if len(rows) > 1 and len(set(rows.values())) > 1:
            names = tuple(rows)
            yield Site(path, min(rows.values()), "stacked parameters", names, names, frozenset(rows.values()))


def _packed(modules: list[tuple[str, nn.Module]]) -> Iterator[Site]:
    """Two or more bare matrices of one shape in one module, which may be [E * rows, columns]; E is not known from them."""
    for path, child in modules:
        if type(child).__module__.startswith("torch.nn"):
            continue
        groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, parameter in child._parameters.items():
            if len(shape_of(parameter)) == 2:
                groups[shape_of(parameter)].append(f"{path}.{name}" if path else name)
        for shape, names in groups.items():
            if len(names) > 1:
                yield Site(path, None, "stacked parameters", tuple(names), tuple(names), frozenset({shape[0]}))


def _listed(modules: list[tuple[str, nn.Module]]) -> Iterator[Site]:
    """A list of two or more modules with the same parameters, among them a matrix there and one back: H to I, I to H.

    Elements without parameters may stand among them: experts that do nothing.
    """
    for path, child in modules:
        if not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            continue
        elements = [
            (name, _shapes(element), type(element)) for name, element in child._modules.items() if element is not None
        ]
        experts = [(name, shapes, kind) for name, shapes, kind in elements if shapes]
        if len(experts) < 2 or any(expert[1:] != experts[0][1:] for expert in experts) or not _is_mlp(experts[0][1]):
            continue
        members = tuple(f"{path}.{name}" if path else name for name, _, _ in elements)
        first = f"{path}.{experts[0][0]}" if path else experts[0][0]
        parameters = tuple(f"{first}.{name}" for name, _ in experts[0][1])
        sizes = frozenset({len(experts), len(elements)})
        yield Site(path, len(experts), "module list", members, parameters, sizes)


def _shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, shape_of(parameter)) for name, parameter in module.named_parameters()]


def _is_mlp(parameters: list[tuple[str, tuple[int, ...]]]) -> bool:
    shapes = [shape for _, shape in parameters if len(shape) == 2]
    return any(one[1] == two[0] for i, one in enumerate(shapes) for j, two in enumerate(shapes) if i != j)


def _holder(names: tuple[str, ...]) -> str:
    """The longest path that all of the names lie under."""
    owners = [name.split(".")[:-1] for name in names]
    steps = zip(*owners, strict=False)
    return ".".join(step[0] for step in itertools.takewhile(lambda step: len(set(step)) == 1, steps))


def inside(path: str, outer: str) -> bool:
    """Whether the name `path` is `outer` or lies below it."""
    return path == outer or path.startswith(f"{outer}.")
