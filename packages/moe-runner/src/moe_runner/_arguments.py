"""Which arguments of a call are hidden states, ids and weights: told by type and shape.

In: the arguments of a call, tensors on meta or anywhere. Out: their places, or None
where the call is not one of experts that are told which to use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_runner.routers import Place


@dataclass(frozen=True, slots=True)
class RoutedCall:
    """A call with hidden states [..., hidden], ids and weights [tokens, k] and nothing else but None."""

    places: tuple[Place, Place, Place]
    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def routed_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RoutedCall | None:
    """The call, if each of the three tensors is there exactly once; no other value may be."""
    given: list[tuple[Place, Any]] = [*enumerate(args), *kwargs.items()]
    tensors = [(place, value) for place, value in given if isinstance(value, torch.Tensor)]
    if len(tensors) != 3 or any(value is not None for _, value in given if not isinstance(value, torch.Tensor)):
        return None
    chosen = [(place, value) for place, value in tensors if not value.is_floating_point() and value.ndim == 2]
    if len(chosen) != 1:
        return None
    ids_at, ids = chosen[0]
    floats = [(place, value) for place, value in tensors if value.is_floating_point()]
    weights = [(place, value) for place, value in floats if value.shape == ids.shape]
    hidden = [
        (place, value)
        for place, value in floats
        if value.ndim >= 2 and value.shape[:-1].numel() == ids.shape[0] and value.shape != ids.shape
    ]
    if len(weights) != 1 or len(hidden) != 1:
        return None
    return RoutedCall((hidden[0][0], ids_at, weights[0][0]), hidden[0][1], ids, weights[0][1])


def is_routed_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is one of experts that are told what to do: hidden states, ids [tokens, k], weights [tokens, k] and nothing else."""
    return routed_call(args, kwargs) is not None


def rows_call(args: tuple[Any, ...], kwargs: Mapping[str, Any], experts: int) -> tuple[Place, torch.Tensor] | None:
    """The one tensor of a call with rows for each expert, [experts * tokens, hidden] or [experts, tokens, hidden], and its place.

    None where anything else is given.
    """
    given: list[tuple[Place, Any]] = [*enumerate(args), *kwargs.items()]
    values = [(place, value) for place, value in given if value is not None]
    if len(values) != 1 or not isinstance(values[0][1], torch.Tensor) or not values[0][1].is_floating_point():
        return None
    place, rows = values[0]
    is_rows = rows.shape[0] == experts if rows.ndim == 3 else rows.ndim == 2 and rows.shape[0] % experts == 0
    return (place, rows) if is_rows else None


def is_rows_call(args: tuple[Any, ...], kwargs: Mapping[str, Any], experts: int) -> bool:
    """Whether a call is one of experts that are given the rows of each of them, and nothing else."""
    return rows_call(args, kwargs, experts) is not None
