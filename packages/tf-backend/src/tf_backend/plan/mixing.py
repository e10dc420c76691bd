"""Operations that mix tokens outside the attention interface, found while a model runs on the meta device.

The engine hands the decoder one flat row of tokens that belong to many requests. All that happens outside attention must treat
each token alone; a convolution over time, a cumulative sum, a shift or a contraction over the token axis would leak one
request into another. The token axis is told by its length: the observed run uses a prime number of tokens that is no other size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_CONTRACTIONS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "dot", "_grouped_mm"}
_ORDERED = {"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "flip", "roll", "sort", "topk", "argsort", "diff"}
_REDUCTIONS = {
    "sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "std", "prod", "logsumexp",
    "_softmax", "_log_softmax", "linalg_vector_norm", "argmax", "argmin", "any", "all",
    "native_layer_norm", "_fused_rms_norm", "native_group_norm", "median", "norm",
}  # fmt: skip
_SELECTIONS = {
    "select",
    "slice",
    "index_select",
    "gather",
    "scatter",
    "scatter_add",
    "index_add",
    "index_put",
    "index_put_",
    "nonzero",
}


@dataclass(frozen=True, slots=True)
class Mixing:
    """One operation that is not alone with its token: the aten op, and the module that was running."""

    op: str
    module: str
    why: str


class MixingDetector(TorchDispatchMode):
    """Records operations over an axis of `tokens` entries, while `is_exempt()` is false.

    Args:
        tokens: length of the token axis; no other size in the model may equal it.
        current_module: gives the full name of the module that is running.
    """

    def __init__(self, tokens: int, current_module: Callable[[], str]) -> None:
        super().__init__()
        self.tokens = tokens
        self.current_module = current_module
        self.found: list[Mixing] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        why = self._why(func.overloadpacket.__name__, args, out)
        if why:
            self.found.append(Mixing(func.overloadpacket.__name__, self.current_module(), why))
        return out

    def _why(self, name: str, args: tuple[Any, ...], out: Any) -> str | None:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if name == "arange" and isinstance(out, torch.Tensor) and out.shape == (self.tokens,):
            return "it counts tokens from 0 instead of reading their positions"
        if not tensors:
            return None
        first = tensors[0]
        axes = [i for i, size in enumerate(first.shape) if size == self.tokens]
        if "convolution" in name or name in {"conv1d", "conv2d"}:
            return self._convolution(args)
        if name in _CONTRACTIONS:
            left = tensors[-2] if len(tensors) >= 2 else first
            return "it contracts over the token axis" if left.shape[-1] == self.tokens else None
        if not axes:
            return None
        if name in _ORDERED:
            return (
                "it is ordered along the token axis" if self._dim_hits(args, axes, first.ndim, default=True) else None
            )
        if name in _REDUCTIONS:
            return self._reduction(name, args, axes, first.ndim)
        if name in _SELECTIONS or name in {"constant_pad_nd", "cat", "unfold"}:
            return self._selection(name, args, axes, first, out)
        return None

    def _convolution(self, args: tuple[Any, ...]) -> str | None:
        weight = args[1] if len(args) > 1 else None
        if isinstance(weight, torch.Tensor) and all(size == 1 for size in weight.shape[2:]):
            return None
        return "it convolves over the token axis"

    def _dim_hits(self, args: tuple[Any, ...], axes: list[int], ndim: int, *, default: bool) -> bool:
        dims = [
            a
            for a in args[1:]
            if isinstance(a, int) or (isinstance(a, list | tuple) and all(isinstance(i, int) for i in a))
        ]
        if not dims:
            return default
        flat = [d for entry in dims for d in ([entry] if isinstance(entry, int) else entry)]
        return any(d % ndim in axes for d in flat if -ndim <= d < ndim)

    def _reduction(self, name: str, args: tuple[Any, ...], axes: list[int], ndim: int) -> str | None:
        if name in {"native_layer_norm", "_fused_rms_norm"}:
            shape = args[1] if len(args) > 1 else []
            hit = any(size == self.tokens for size in shape)
        elif name == "native_group_norm":
            hit = True
        elif name == "linalg_vector_norm":
            dims = args[2] if len(args) > 2 and args[2] is not None else list(range(ndim))
            hit = any(d % ndim in axes for d in dims)
        else:
            dims = args[1] if len(args) > 1 else None
            if isinstance(dims, bool) or dims is None or isinstance(dims, torch.Tensor):
                hit = not isinstance(dims, torch.Tensor)
            else:
                hit = any(d % ndim in axes for d in ([dims] if isinstance(dims, int) else dims)) or dims == []
        return "it reduces over the token axis" if hit else None

    def _selection(
        self, name: str, args: tuple[Any, ...], axes: list[int], first: torch.Tensor, out: Any
    ) -> str | None:
        if name == "nonzero":
            return "which tokens it picks depends on their values"
        if not isinstance(out, torch.Tensor):
            return None
        if name in {"select", "index_select", "gather", "scatter", "scatter_add", "index_add"}:
            dim = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
            return "it picks or scatters along the token axis" if dim % first.ndim in axes else None
        if name in {"slice", "constant_pad_nd", "unfold"}:
            changed = any(axis >= out.ndim or out.shape[axis] != self.tokens for axis in axes)
            return "it shifts or cuts the token axis" if changed else None
        return None
