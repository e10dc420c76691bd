"""The arguments of an operation by name, whichever way they were passed.

`x.mean(-1, keepdim=True)` and `torch.mean(x, dim=-1, keepdim=True)` give the same: {"input": x, "dim": -1, "keepdim": True,
"dtype": None}. Names come from torch's own schemas and signatures; "self" is called "input", as in torch's documentation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fx_match._canonical import canonical, cast_dtype

_RENAMED = {
    "self": "input",
    "axis": "dim",
    "keepdims": "keepdim",
    "split_sizes": "split_size",
    "split_size_or_sections": "split_size",
    "tensor": "input",
    "shape": "size",
    "a": "input",  # functions of `operator`
    "b": "other",
}
# Methods that take a list of sizes or dims either as one argument or spread out.
_SPREAD = {
    "view",
    "reshape",
    "permute",
    "expand",
    "repeat",
    "flip",
    "tile",
    "size",
    "new_zeros",
    "new_ones",
    "new_empty",
}
_LIST_NAMES = {"permute": "dim", "flip": "dim", "repeat": "size", "tile": "size"}

_Slot = tuple[str, str, bool, Any]  # name, type, keyword only, default
_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Bound:
    """Arguments by name, in the order of the operation's signature, and which optional ones are not at their default."""

    values: dict[str, Any]
    changed: frozenset[str]


class NoSuchArgument(KeyError):
    """The operation has no argument of that name, or its arguments cannot be named."""


def argument(node: fx.Node, name: str) -> Any:
    """The argument `name` of the node's operation, its default if it was not passed.

    Raises NoSuchArgument if the operation has none of that name. For a cast, "dtype" is known however it was written.
    """
    if name == "dtype" and canonical(node) == "cast":
        return cast_dtype(node)
    bound = arguments(node)
    if bound is None or name not in bound:
        raise NoSuchArgument(f"{node.name} ({canonical(node)}) has no argument named {name!r}")
    return bound[name]


def arguments(node: fx.Node) -> dict[str, Any] | None:
    """All arguments of the node's operation by name, defaults included; None where they cannot be named."""
    bound = bind(node)
    return None if bound is None else bound.values


def bind(node: fx.Node) -> Bound | None:
    """`arguments`, with the names of the optional ones that differ from their default."""
    if node.op not in ("call_function", "call_method"):
        return None
    args, kwargs = node.args, {_RENAMED.get(key, key): value for key, value in node.kwargs.items()}
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _bind(_slots_of(target), args, kwargs)
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name in _SPREAD and len(args) > 1 and not isinstance(args[1], (tuple, list)) and not _is_shape(args[1]):
        args = (args[0], tuple(args[1:]))
    if not isinstance(target, str) and (slots := _signature(target)) is not None:
        return _bind(slots, args, kwargs)
    for slots in _schemas(name):
        bound = _bind(slots, args, kwargs)
        if bound is not None:
            return bound
    return None


def _is_shape(value: Any) -> bool:
    return isinstance(value, fx.Node) and canonical(value) == "shape"


@functools.lru_cache(maxsize=4096)
def _signature(function: Callable[..., Any]) -> tuple[_Slot, ...] | None:
    """Slots of a Python function; None for a builtin."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    return tuple(
        (
            _RENAMED.get(p.name, p.name),
            "Any",
            p.kind is p.KEYWORD_ONLY,
            _REQUIRED if p.default is p.empty else p.default,
        )
        for p in parameters
    )


@functools.lru_cache(maxsize=4096)
def _schemas(name: str) -> tuple[tuple[_Slot, ...], ...]:
    """Slots of each overload of an ATen operation, those that write into `out` last."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None and name.startswith("__") and name.endswith("__"):
        packet = getattr(torch.ops.aten, name.strip("_"), None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return ()
    overloads = [getattr(packet, overload or "default") for overload in packet._overload_names]
    return tuple(_slots_of(overload) for overload in sorted(overloads, key=lambda o: "out" in o._overloadname))


@functools.lru_cache(maxsize=4096)
def _slots_of(overload: torch._ops.OpOverload[Any, Any]) -> tuple[_Slot, ...]:
    name = overload._schema.name.partition("::")[2]
    return tuple(
        (
            _LIST_NAMES.get(name, "") if index == 1 and name in _LIST_NAMES else _RENAMED.get(item.name, item.name),
            str(item.type),
            item.kwarg_only,
            item.default_value if item.has_default_value() else _REQUIRED,
        )
        for index, item in enumerate(overload._schema.arguments)
    )


def _bind(slots: tuple[_Slot, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound | None:
    positional = [slot for slot in slots if not slot[2]]
    if len(args) > len(positional):
        return None
    given = {slot[0]: value for slot, value in zip(positional, args, strict=False)}
    if given.keys() & kwargs.keys():
        return None
    given |= kwargs
    bound: dict[str, Any] = {}
    changed = set()
    for name, kind, _, default in slots:
        if name in given:
            if not _fits(given[name], kind):
                return None
            value = bound[name] = given.pop(name)
            if default is not _REQUIRED and (isinstance(value, fx.Node) or value != default):
                changed.add(name)
        elif default is _REQUIRED:
            return None
        else:
            bound[name] = default
    return None if given else Bound(bound, frozenset(changed))


def _fits(value: Any, kind: str) -> bool:
    """Whether a value may be passed for a schema type; only what tells overloads apart is looked at."""
    if kind.startswith("Optional["):
        return value is None or _fits(value, kind[9:-1])
    if isinstance(value, fx.Node) or kind == "Any":
        return not kind.startswith("List[Tensor") or not isinstance(value, fx.Node)
    if kind == "Tensor":
        return isinstance(value, torch.Tensor)
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "int":
        return isinstance(value, (int, torch.dtype, torch.layout, torch.memory_format)) and not isinstance(value, bool)
    if kind in ("float", "number"):
        return isinstance(value, (int, float, complex))
    if kind == "str":
        return isinstance(value, str)
    if kind == "Device":
        return isinstance(value, (str, torch.device))
    if kind.startswith("List["):
        return isinstance(value, (tuple, list)) or (kind == "List[int]" and isinstance(value, int))
    return True
