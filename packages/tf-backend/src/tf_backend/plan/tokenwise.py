"""What an aten operation does to the token axis: nothing, or why it is not alone with each token.

In: one operation with its arguments on meta. Out: a reason, or None. The list is of what is known to treat each token alone: an operation
that is not on it and meets a token axis is a doubt, and a doubt is a reason.

An axis is a token axis if its length is a multiple of `tokens`, a prime that divides no other size in the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_ELEMENTWISE = frozenset(
    {
        "_to_copy", "copy", "fill", "zero", "alias", "detach", "lift_fresh", "lift_fresh_copy", "clone",
        "contiguous", "empty", "zeros", "ones", "full", "scalar_tensor", "empty_like", "zeros_like",
        "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full", "empty_strided",
        "new_empty_strided", "masked_fill", "where", "tril", "triu", "view_as_real", "view_as_complex", "real",
        "imag", "complex", "polar", "resolve_conj", "resolve_neg", "stack", "unsqueeze", "squeeze", "transpose",
        "permute", "t", "expand", "numpy_T", "mT",
    }
)  # fmt: skip
"""Entries are moved with their token or made alike for all; `stack` puts a new axis beside it."""
_COUNTING = frozenset({"arange", "linspace", "range", "eye", "tril_indices", "triu_indices"})
_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy", "view_copy"})
_ORDERED = frozenset(
    {
        "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "flip", "roll", "sort", "topk", "argsort",
        "kthvalue", "mode", "diff", "renorm",
    }
)  # fmt: skip
_REDUCTIONS = frozenset(
    {
        "sum", "mean", "amax", "amin", "max", "min", "aminmax", "var", "var_mean", "std", "std_mean", "prod",
        "logsumexp", "argmax", "argmin", "any", "all", "median", "nanmedian", "nansum", "norm",
        "linalg_vector_norm", "count_nonzero", "_softmax", "_log_softmax", "softmax", "log_softmax", "glu",
    }
)  # fmt: skip
_PICKS = frozenset(
    {
        "select", "unbind", "index_select", "gather", "scatter", "scatter_add", "scatter_reduce", "index_add",
        "index_copy", "index_fill", "unfold", "split", "split_with_sizes", "unsafe_split", "chunk",
        "tensor_split", "split_copy", "split_with_sizes_copy",
    }
)  # fmt: skip
_PIECES = frozenset(name for name in _PICKS if "split" in name or name == "chunk")
_CONTRACTED: dict[str, tuple[str, int]] = {
    "mm": ("self", -1),
    "addmm": ("mat1", -1),
    "bmm": ("self", -1),
    "baddbmm": ("batch1", -1),
    "mv": ("self", -1),
    "addmv": ("mat", -1),
    "dot": ("self", -1),
    "vdot": ("self", -1),
    "linear": ("input", -1),
}
"""Operation -> the argument and axis over which it sums products."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of an aten operation, its arguments by name."""

    name: str
    arguments: dict[str, Any]
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    is_pointwise: bool

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Operation:
        """Bind `args` to the names in the schema of `func`; in-place operations get the name of the other form."""
        names, defaults = _signature(func)
        name: str = func.overloadpacket.__name__
        if name.endswith("_") and not name.startswith("__"):
            name = name[:-1]
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        return cls(name, arguments, _tensors(arguments.values()), _tensors([out]), torch.Tag.pointwise in func.tags)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor argument of that name."""
        found = self.arguments[name]
        assert isinstance(found, torch.Tensor)
        return found


@cache
def _signature(func: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names of the arguments, and their defaults: the dispatcher leaves out what has its default."""
    schema = func._schema.arguments
    return tuple(argument.name for argument in schema), {
        argument.name: argument.default_value for argument in schema if argument.has_default_value()
    }


def why_not_tokenwise(operation: Operation, tokens: int) -> str | None:
    """Why `operation` is not alone with each token, as a clause whose subject is "it"; None when it is."""

    def is_token(size: int) -> bool:
        return size > 0 and size % tokens == 0

    def meets(tensors: Iterable[torch.Tensor]) -> bool:
        return any(is_token(size) for tensor in tensors for size in tensor.shape)

    if not meets(operation.inputs) and not meets(operation.outputs):
        return None
    if operation.name in _COUNTING:
        return "it counts tokens from 0 instead of reading their positions"
    if operation.is_pointwise or operation.name in _ELEMENTWISE:
        return None
    rule = _rule(operation.name)
    if rule is None:
        return "it is not known to treat each token alone"
    return rule(operation, is_token, tokens)


_IsToken = Callable[[int], bool]
_Rule = Callable[[Operation, _IsToken, int], str | None]


def _rule(name: str) -> _Rule | None:
    if name in _VIEWS:
        return _view
    if name in _ORDERED:
        return _ordered
    if name in _REDUCTIONS:
        return _reduction
    if name in _PICKS:
        return _pick
    if name in _CONTRACTED:
        return _contraction
    return _OTHERS.get(name)


def _view(operation: Operation, is_token: _IsToken, tokens: int) -> str | None:
    """Entries of one token lie together, `unit` of them; they must do so after the view too."""
    before, after = operation.inputs[0].shape, operation.outputs[0].shape
    units_after = [_units(after, axis, tokens) for axis, size in enumerate(after) if is_token(size)]
    for axis, size in enumerate(before):
        if is_token(size) and all(units.isdisjoint(_units(before, axis, tokens)) for units in units_after):
            return "it regroups entries of different tokens"
    return None


def _units(shape: Sequence[int], axis: int, tokens: int) -> frozenset[int]:
    """How many neighbours can belong to one token, where `axis` holds the tokens, perhaps folded with other axes."""
    inner, folded = math.prod(shape[axis + 1 :]), shape[axis] // tokens
    return frozenset(inner * d for d in range(1, folded + 1) if folded % d == 0)


def _ordered(operation: Operation, is_token: _IsToken, tokens: int) -> str | None:
    return "it is ordered along the token axis" if _hits(operation, is_token) else None


def _reduction(operation: Operation, is_token: _IsToken, tokens: int) -> str | None:
    return "it reduces over the token axis" if _hits(operation, is_token) else None


def _pick(operation: Operation, is_token: _IsToken, tokens: int) -> str | None:
    if operation.name in _PIECES and len(operation.outputs) == 1:
        return None
    return "it picks or scatters along the token axis" if _hits(operation, is_token, default=(0,)) else None


def _hits(operation: Operation, is_token: _IsToken, default: Sequence[int] | None = None) -> bool:
    """Whether the axes that the operation names hold tokens; all axes where it names none, unless `default` says which."""
    first = operation.inputs[0]
    named: Any = next(
        (operation.arguments[key] for key in ("dim", "dims", "dimension") if key in operation.arguments), None
    )
    axes: Sequence[int]
    if named is None or named == []:
        axes = range(first.ndim) if default is None else default
    elif isinstance(named, int):
        axes = (named,)
    else:
        axes = tuple(named)
    return any(is_token(first.shape[axis]) for axis in axes) if first.ndim else False


def _contraction(operation: Operation, is_token: _IsToken, tokens: int) -> str | None:
    name, axis = _CONTRACTED[operation.name]
    return "it contracts over the token axis" if is_token(operation.tensor(name).shape[axis]) else None


def _slice(operation: Operation, is_token: _IsToken, tokens: int) -> str | None:
    axis = operation.arguments.get("dim", 0)
    before, after = operation.inputs[0].shape[axis], operation.outputs[0].shape[axis]
    if before == after:
        return None
    if is_token(before):
        return "it shifts or cuts the token axis"
    if is_token(after):
        return "it counts tokens from 0 instead of reading their positions"
    return None


def _cat(operation: Operation, is_token: _IsToken, tokens: int) -> str | None:
    axis = operation.arguments.get("dim", 0)
    parts = [part for part in operation.inputs if part.numel()]
    if len(parts) > 1 and any(is_token(part.shape[axis]) for part in parts):
        return "it joins along the token axis"
    return None


def _pad(operation: Operation, is_token: _IsToken, tokens: int) -> str | None:
    widths: Sequence[int] = operation.arguments["pad"]
    shape = operation.inputs[0].shape
    padded = [shape[-1 - i // 2] for i, width in enumerate(widths) if width]
    return "it shifts or cuts the token axis" if any(is_token(size) for size in padded) else None


def _repeat(operation: Operation, is_token: _IsToken, tokens: int) -> str | None:
    shape, repeats = operation.inputs[0].shape, operation.arguments["repeats"]
    if len(shape) == 0:
        return None
    own = repeats[-len(shape) :]
    return (
        "it repeats the token axis"
        if any(is_token(size) and count != 1 for size, count in zip(shape, own, strict=True))
        else None
    )


def _embedding(operation: Operation, is_token: _IsToken, tokens: int) -> str | None:
    return "it picks or scatters along the token axis" if is_token(operation.tensor("weight").shape[0]) else None


def _index(operation: Operation, is_token: _IsToken, tokens: int) -> str | None:
    shape = operation.tensor("self").shape
    indexed = [axis for axis, index in enumerate(operation.arguments["indices"]) if index is not None]
    return "it picks or scatters along the token axis" if any(is_token(shape[axis]) for axis in indexed) else None


def _layer_norm(operation: Operation, is_token: _IsToken, tokens: int) -> str | None:
    over = operation.inputs[0].shape[-len(operation.arguments["normalized_shape"]) :]
    return "it reduces over the token axis" if any(is_token(size) for size in over) else None


def _group_norm(operation: Operation, is_token: _IsToken, tokens: int) -> str | None:
    over = operation.inputs[0].shape[1:]
    return "it reduces over the token axis" if any(is_token(size) for size in over) else None


def _convolution(operation: Operation, is_token: _IsToken, tokens: int) -> str | None:
    """Over [samples, channels, *space]: tokens may be samples, or space under a kernel of one that neither pads nor skips."""
    shape, weight = operation.inputs[0].shape, operation.tensor("weight").shape
    if is_token(shape[1]):
        return "it contracts over the token axis"
    for axis, size in enumerate(shape[2:]):
        stays = weight[axis + 2] == 1 and operation.outputs[0].shape[axis + 2] == size
        if is_token(size) and not stays:
            return "it convolves over the token axis"
    return None


_OTHERS: dict[str, _Rule] = {
    "slice": _slice,
    "narrow": _slice,
    "cat": _cat,
    "constant_pad_nd": _pad,
    "repeat": _repeat,
    "embedding": _embedding,
    "index": _index,
    "index_put": _index,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _layer_norm,
    "native_group_norm": _group_norm,
    "convolution": _convolution,
}


def _tensors(values: Iterable[Any]) -> tuple[torch.Tensor, ...]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(_tensors(value))
    return tuple(found)
