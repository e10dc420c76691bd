"""One name for every spelling of an operation: `a * b`, `torch.mul`, `Tensor.mul_`, `aten.mul.Tensor` are all "mul".

Only functions of torch, `operator`, `math` and the builtins have a short name; any other callable is named by its module
and qualified name, so that a user's own `mul` is never taken for torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_ALIASES = {
    # arithmetic
    "multiply": "mul",
    "imul": "mul",
    "iadd": "add",
    "isub": "sub",
    "subtract": "sub",
    "rsub": "sub",
    "truediv": "div",
    "itruediv": "div",
    "divide": "div",
    "true_divide": "div",
    "floordiv": "floor_div",
    "ifloordiv": "floor_div",
    "floor_divide": "floor_div",
    "negative": "neg",
    "absolute": "abs",
    "ipow": "pow",
    "mod": "remainder",
    "and_": "bitwise_and",
    "or_": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "logical_not_": "logical_not",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "clip": "clamp",
    # products
    "bmm": "matmul",
    "mm": "matmul",
    "imatmul": "matmul",
    "__matmul__": "matmul",
    # views and copies
    "view": "reshape",
    "_unsafe_view": "reshape",
    "view_as": "reshape",
    "reshape_as": "reshape",
    "_reshape_alias": "reshape",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "t": "transpose",
    "T": "transpose",
    "mT": "transpose",
    "expand_as": "expand",
    "concat": "cat",
    "concatenate": "cat",
    "split_with_sizes": "split",
    "lift_fresh_copy": "clone",
    # functions with a private or special form in ATen
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "special_expit": "sigmoid",
}

_CAST_METHODS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "bool": torch.bool,
}

_KNOWN_MODULES = ("torch", "_operator", "operator", "math", "builtins")

CASTS = frozenset({"cast"})
"""Canonical names of operations that change a tensor's dtype and nothing else."""

VIEWS = frozenset(
    {"reshape", "transpose", "permute", "contiguous", "squeeze", "unsqueeze", "flatten", "unflatten", "clone", "alias"}
    | {"detach", "expand", "view_as_real"}
)
"""Canonical names of operations that rearrange a tensor's elements, copy them or repeat them, and change no number."""

COMMUTATIVE = frozenset({"add", "mul", "eq", "ne", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor"})
"""Canonical names of operations whose two operands may be swapped."""


def canonical(node: fx.Node) -> str:
    """The operation of a node: "mul", "cast", "reshape" ...; for the other kinds of node, the kind without "call_".

    What changes the result changes the name: `add(x, y, alpha=2)` is "add_scaled", `div(x, y, rounding_mode="floor")` is
    "floor_div", `.to(dtype)` is "cast", `.to(device)` is "to" and `.view(dtype)` is "view_dtype". Reads of a shape are "shape" and "size".
    """
    if node.op not in ("call_function", "call_method"):
        return node.op.removeprefix("call_")
    name = _spelt(node.target)
    if "." in name:
        return name
    if name == "view" and any(isinstance(value, torch.dtype) for value in (*node.args[1:], *node.kwargs.values())):
        return "view_dtype"
    if name == "_softmax" and len(node.args) > 2 and node.args[2] is not False:
        return "softmax_to_float"
    if name == "getattr":
        name = str(node.args[1]) if len(node.args) > 1 else name
    name = _ALIASES.get(name) or _without_inplace_mark(name)
    name = _ALIASES.get(name, name)
    if name in _CAST_METHODS and node.op == "call_method":
        return "cast"
    if name in ("to", "_to_copy", "type", "type_as", "_prims_convert_element_type", "convert_element_type"):
        return _conversion(node, name)
    if name in ("add", "sub") and node.kwargs.get("alpha", 1) != 1:
        return f"{name}_scaled"
    if name == "div" and node.kwargs.get("rounding_mode") is not None:
        return {"floor": "floor_div"}.get(str(node.kwargs["rounding_mode"]), "trunc_div")
    return name


def is_inplace(node: fx.Node) -> bool:
    """Whether the operation writes into its first operand, or into `out=`."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = _spelt(node.target)
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace") is True:
        return True
    if name in ("setitem", "setattr", "__set__"):
        return True
    target: Any = node.target
    if getattr(target, "__module__", "") in ("_operator", "operator"):
        return name in (
            "iadd",
            "isub",
            "imul",
            "itruediv",
            "ifloordiv",
            "ipow",
            "imatmul",
            "iand",
            "ior",
            "ixor",
            "imod",
        )
    return name != _without_inplace_mark(name)


def cast_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype that a "cast" node casts to; None if the node does not tell (a cast to another tensor's unknown type)."""
    name = _without_inplace_mark(_spelt(node.target))
    if node.op == "call_method" and name in _CAST_METHODS:
        return _CAST_METHODS[name]
    for value in (*node.args[1:], *node.kwargs.values()):
        if isinstance(value, torch.dtype):
            return value
        if isinstance(value, fx.Node):
            other = node_value(value)
            return other.dtype if isinstance(other, torch.Tensor) else None
    return None


def node_value(node: fx.Node) -> Any:
    """The value that the tracer left on the node: fx-match and torch.export use "val", dynamo "example_value"."""
    return node.meta.get("val", node.meta.get("example_value"))


def _spelt(target: Any) -> str:
    """The name under which torch knows the target, as the graph spells it; with a module path for other callables."""
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name if namespace in ("aten", "prims") else f"{namespace}.{name}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        namespace, _, name = target._qualified_op_name.partition("::")
        return name if namespace in ("aten", "prims") else f"{namespace}.{name}"
    return callable_name(target)


def callable_name(target: Callable[..., Any]) -> str:
    """Short for functions of torch and the standard operators; `module.qualname` for all others."""
    name = getattr(target, "__name__", type(target).__name__)
    module: str | None = getattr(target, "__module__", None)
    if module is None:  # method descriptors and builtins of torch's C library
        owner = getattr(target, "__objclass__", None) or type(getattr(target, "__self__", None))
        module = str(getattr(owner, "__module__", ""))
    if module in _KNOWN_MODULES or module.startswith("torch."):
        return str(name)
    return f"{module}.{getattr(target, '__qualname__', name)}"


def _without_inplace_mark(name: str) -> str:
    return name[:-1] if name.endswith("_") and not name.endswith("__") and len(name) > 1 else name


def _conversion(node: fx.Node, name: str) -> str:
    values = (*node.args[1:], *node.kwargs.values())
    if any(isinstance(value, (torch.dtype, fx.Node)) for value in values):
        return "cast"
    if name == "_to_copy" and not any(value is not None for value in values):
        return "clone"
    return "to"


def is_number(value: object) -> bool:
    """A Python number that is no bool and no nan."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
