"""Where experts may lie in a module: stacked parameters or a list of like modules. From structure and shapes alone.

In: a module. Out: a `Site`, with names relative to that module, or None. A site is a candidate: decoder layers are a
list of like modules too, so what makes a site experts is the choice that leads to it (`_recognize`).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from moe_runner._block import Storage
from moe_runner._spelling import Mention, choices_spelled

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
    rows: int
    """First dimension of the parameters."""

    def covers(self, path: str) -> bool:
        """Whether the child or parameter `path` is part of the site, or a child on the way to it."""
        return any(_inside(path, member) or _inside(member, path) for member in self.members)


def walk(module: nn.Module, depth: int = DEPTH, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """`module` and what lies at most `depth` levels below it, with relative names; elements of a list count as a level."""
    yield path, module
    if depth:
        for name, child in module._modules.items():
            if child is not None:
                yield from walk(child, depth - 1, f"{path}.{name}" if path else name)


def spelled_choices(module: nn.Module, site: Site | None = None) -> tuple[Mention, ...]:
    """Lines in `module` and near below it that spell a choice; not those of the experts' own modules."""
    found: dict[Mention, None] = {}
    for path, child in walk(module):
        if site is None or not path or not site.covers(path):
            found |= dict.fromkeys(choices_spelled(child))
    return tuple(found)


def expert_site(module: nn.Module) -> Site | None:
    """What looks like experts in `module` and does not belong to a block further inside."""
    claimed = [path for path, child in walk(module) if path and holds_block(child)]
    free = [(path, child) for path, child in walk(module) if not any(_inside(path, inner) for inner in claimed)]
    return _stacked(free) or _listed(free) or _packed(free)


def holds_block(module: nn.Module) -> bool:
    """Whether structure alone makes `module` a block: experts, a choice spelled near them, weights of a router."""
    if not spelled_choices(module):
        return False
    site = expert_site(module)
    return site is not None and bool(spelled_choices(module, site)) and router_size(module, site) is not None


def router_size(module: nn.Module, site: Site) -> int | None:
    """E, if a matrix outside the site has E for a dimension; for packed parameters the one E that divides them."""
    sizes = set()
    for path, child in walk(module):
        for name, parameter in child._parameters.items():
            full = f"{path}.{name}" if path else name
            if parameter is not None and parameter.dim() == 2 and not site.covers(full):
                sizes |= {parameter.shape[0]} if site.num_experts is None else set(parameter.shape)
    if site.num_experts is not None:
        return site.num_experts if site.num_experts in sizes else None
    fitting = {size for size in sizes if 2 <= size < site.rows and site.rows % size == 0}
    return fitting.pop() if len(fitting) == 1 else None


def _stacked(modules: list[tuple[str, nn.Module]]) -> Site | None:
    """Two or more parameters of rank 3 with one first dimension: [E, rows, columns] each."""
    groups: dict[int, list[str]] = defaultdict(list)
    for path, child in modules:
        if isinstance(child, (nn.modules.conv._ConvNd, nn.Bilinear)):  # [channels, channels, window], [out, in, in]
            continue
        for name, parameter in child._parameters.items():
            if parameter is not None and parameter.dim() == 3 and parameter.shape[0] >= 2:
                groups[parameter.shape[0]].append(f"{path}.{name}" if path else name)
    if not groups:
        return None
    size, names = max(groups.items(), key=lambda group: len(group[1]))
    return (
        Site(_holder(names), size, "stacked parameters", tuple(names), tuple(names), size) if len(names) > 1 else None
    )


def _packed(modules: list[tuple[str, nn.Module]]) -> Site | None:
    """Two or more bare matrices of one shape in one module, which may be [E * rows, columns]; E is not known from them."""
    for path, child in modules:
        if type(child).__module__.startswith("torch.nn"):
            continue
        groups: dict[torch.Size, list[str]] = defaultdict(list)
        for name, parameter in child._parameters.items():
            if parameter is not None and parameter.dim() == 2:
                groups[parameter.shape].append(f"{path}.{name}" if path else name)
        for shape, names in groups.items():
            if len(names) > 1:
                return Site(path, None, "stacked parameters", tuple(names), tuple(names), shape[0])
    return None


def _listed(modules: list[tuple[str, nn.Module]]) -> Site | None:
    """A list of two or more modules with the same parameters, among them a matrix there and one back: H to I, I to H."""
    for path, child in modules:
        if not isinstance(child, (nn.ModuleList, nn.ModuleDict)) or len(child) < 2:
            continue
        elements = list(child._modules.items())
        first = elements[0][1]
        if first is None or not _is_mlp(first):
            continue
        if all(_alike(first, other) for _, other in elements[1:]):
            members = tuple(f"{path}.{name}" if path else name for name, _ in elements)
            names = tuple(f"{members[0]}.{name}" for name, _ in first.named_parameters())
            return Site(path, len(elements), "module list", members, names, len(elements))
    return None


def _alike(one: nn.Module, other: nn.Module | None) -> bool:
    return other is not None and type(one) is type(other) and _shapes(one) == _shapes(other)


def _shapes(module: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, parameter.shape) for name, parameter in module.named_parameters()]


def _is_mlp(module: nn.Module) -> bool:
    shapes = [shape for _, shape in _shapes(module) if len(shape) == 2]
    return any(one[1] == two[0] for i, one in enumerate(shapes) for j, two in enumerate(shapes) if i != j)


def _holder(names: list[str]) -> str:
    """The longest path that all of the names lie under."""
    paths = [name.split(".")[:-1] for name in names]

    def common(one: list[str], two: list[str]) -> list[str]:
        length = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
        return one[:length]

    return ".".join(functools.reduce(common, paths))


def _inside(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")
