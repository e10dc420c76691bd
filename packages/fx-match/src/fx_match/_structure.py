"""Mapping over the nested containers in which tensors are passed and returned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

Path: TypeAlias = tuple[tuple[str, Any], ...]
"""Steps from a value to a part of it: ("item", index or key) or ("attr", name)."""

_ATOMS = (int, float, str, bool, complex, type(None), torch.dtype, torch.device)


def map_leaves(function: Callable[[Any], Any], value: Any, whole: Callable[[Any], Any] | None = None) -> Any:
    """`value` with each leaf of its tuples, lists, dicts and slices replaced; other objects are leaves themselves.

    `whole` may give a replacement for a container; where it gives None, the container's parts are replaced.
    A `torch.Size` becomes a plain tuple if a replacement no longer is an int. Containers keep their type otherwise.
    """
    kind = type(value)
    if kind is slice:
        return slice(*(map_leaves(function, part, whole) for part in (value.start, value.stop, value.step)))
    if not isinstance(value, (tuple, list, dict)) or (kind is not dict and isinstance(value, dict)):
        return function(value)
    if whole is not None and (replacement := whole(value)) is not None:
        return replacement
    if isinstance(value, dict):
        return {key: map_leaves(function, item, whole) for key, item in value.items()}
    items = [map_leaves(function, item, whole) for item in value]
    if kind is tuple or kind is list:
        return kind(items)
    if kind is torch.Size:
        return torch.Size(items) if all(isinstance(item, int) for item in items) else tuple(items)
    return kind(*items) if hasattr(value, "_fields") else _sequence_like(kind, items)


def _sequence_like(kind: type, items: list[Any]) -> Any:
    """A tuple subclass built again: `torch.return_types.*` and plain subclasses take one sequence."""
    try:
        return kind(items)
    except TypeError:
        return tuple(items)


def tensors_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Every tensor in a returned structure with its path: tuples, lists, mappings, dataclasses."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, _ATOMS):
        return
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from tensors_in(item, (*path, ("item", index)))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, (*path, ("item", key)))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), (*path, ("attr", field.name)))


def holds_tensor(value: Any) -> bool:
    """Whether a tensor lies anywhere in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (tuple, list)):
        return any(holds_tensor(item) for item in value)
    return isinstance(value, dict) and any(holds_tensor(item) for item in value.values())


def output_structure(function: Callable[[Any], Any], value: Any) -> Any:
    """A returned value with its tensors replaced; mappings and dataclasses become plain dicts, empty fields left out."""
    if isinstance(value, dict):
        return {key: output_structure(function, item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return {name: output_structure(function, item) for name, item in fields.items() if item is not None}
    if isinstance(value, torch.Size):
        return map_leaves(function, value)
    if isinstance(value, (tuple, list)):
        items = [output_structure(function, item) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return items if isinstance(value, list) else tuple(items)
    return function(value)
