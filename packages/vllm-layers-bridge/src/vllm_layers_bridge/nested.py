"""Tensors inside of the containers that modules and operations are called with."""

from __future__ import annotations

from typing import Any

import torch


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in `value`, in order: itself, or in tuples, lists and the values of dicts, however deep."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []
