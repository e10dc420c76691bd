"""Running experts on numbers: a copy of the module on the CPU whose weights are zero but for a few experts.

In: a module of experts, on meta or anywhere, and how it is called. Out: what its forward gives, and what it used on the way. The memory of
experts that are never touched is never given: a layer of 256 experts costs what the three that run cost.
"""

from __future__ import annotations

import inspect
import math
import mmap
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux: pages that nobody writes to take no memory
_LAZY_FROM = 1 << 26
_DOUBLE_UP_TO = 1 << 24
"""Entries of one expert up to which numbers are float64."""


class Copy:
    """A copy of `module` whose parameters are zeros on the CPU; it shares everything else."""

    def __init__(self, module: nn.Module, experts: int, dtype: torch.dtype | None = None) -> None:
        each = sum(parameter.numel() for parameter in module.parameters()) // max(experts, 1)
        self.dtype = dtype or (torch.float64 if each <= _DOUBLE_UP_TO else torch.float32)
        self.module = _copy(module, self.dtype)
        self.parameters: dict[str, Tensor] = {name: p.data for name, p in self.module.named_parameters()}
        self._forward = inspect.unwrap(type(module).forward)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the forward that the class was written with gives."""
        with torch.no_grad():
            return self._forward(self.module, *args, **kwargs)


def bare(module: nn.Module) -> nn.Module:
    """`module` with the same tensors, without hooks and without forwards of its own: what runs is what its classes say."""
    copy: nn.Module = type(module).__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__.pop("forward", None)
    copy.__dict__.update({name: type(hooks)() for name, hooks in module.__dict__.items() if name in _HOOKS})
    copy.__dict__["_modules"] = {
        name: None if child is None else bare(child) for name, child in module._modules.items()
    }
    return copy


_HOOKS = frozenset(
    {"_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"}
    | {"_forward_hooks_always_called"}
)


def _copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    copy = bare(module)
    copy.__dict__["_parameters"] = {
        name: None if parameter is None else nn.Parameter(_zeros(parameter.shape, dtype), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    copy.__dict__["_modules"] = {
        name: None if child is None else _copy(child, dtype) for name, child in module._modules.items()
    }
    return copy


def _zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    size = shape.numel() * dtype.itemsize
    if size < _LAZY_FROM:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the numbers that operations on floating tensors take as arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[float] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and torch.Tag.pointwise in func.tags:
            self.found |= {float(v) for v in _scalars((*args, *(kwargs or {}).values())) if math.isfinite(v)}
        return out


def _scalars(values: tuple[Any, ...]) -> Iterator[float]:
    for value in values:
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value
        elif isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point():
            yield float(value)
