"""What may be said of the children that a fusion takes away: plain linears, called once, and used in no other way.

In: a trace, or an instance of its variant. Out: the child, a reason, or `NotFusable`. A child that goes into a merged layer is gone from
the module: whatever else reads it would fail, or, worse, not.
"""

from __future__ import annotations

from typing import Any

from fx_match import Trace, canonical, module_activation
from torch import fx, nn

from vllm_layers_bridge.errors import NotFusable

_SHAPE_READS = frozenset({"shape", "size", "numel", "nelement", "stride", "dim"})


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs more than its class's forward: hooks, or a forward of the instance's own."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def is_plain_linear(module: object) -> bool:
    """Whether a child is an `nn.Linear` and no subclass, and its call runs nothing else."""
    return type(module) is nn.Linear and not has_hooks(module)


def is_transposed_linear(module: object) -> bool:
    """Whether a child is transformers' `Conv1D`, a linear whose weight is [in, out], and its call runs nothing else."""
    if not isinstance(module, nn.Module) or type(module).__name__ != "Conv1D":
        return False
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D and not has_hooks(module)


def is_any_linear(module: object) -> bool:
    """Whether a child computes ``x W^T + b`` and nothing else, whichever way it keeps W."""
    return is_plain_linear(module) or is_transposed_linear(module)


def plain_linear(module: nn.Module, node: fx.Node) -> nn.Linear:
    """The child of this instance that `node` calls; NotFusable where it is no plain linear."""
    name = str(node.target)
    try:
        child = module.get_submodule(name)
    except AttributeError:
        raise NotFusable(f"this instance has no child `{name}`") from None
    if not is_plain_linear(child) or not isinstance(child, nn.Linear):
        kind = type(child).__name__
        reason = "an nn.Linear with hooks" if type(child) is nn.Linear else f"a {kind}"
        raise NotFusable(f"its `{name}` is {reason}; only a plain nn.Linear can be merged")
    return child


def require_mergeable(names: tuple[str, ...], linears: tuple[nn.Linear, ...]) -> None:
    """Raises NotFusable unless the linears are distinct, of one input width and dtype, with a bias each or none at all."""
    first = linears[0]
    for name, linear in zip(names[1:], linears[1:], strict=True):
        if linear is first or any(linear is other for other in linears if other is not linear):
            raise NotFusable(f"{' and '.join(names)} are not distinct layers")
        if linear.in_features != first.in_features:
            raise NotFusable(f"{names[0]} takes {first.in_features} features and {name} takes {linear.in_features}")
        if linear.weight.dtype != first.weight.dtype:
            raise NotFusable(f"{names[0]} holds {first.weight.dtype} and {name} holds {linear.weight.dtype}")
    tensors = [tensor for linear in linears for tensor in (linear.weight, linear.bias) if tensor is not None]
    if len({id(linear) for linear in linears}) != len(linears):
        raise NotFusable(f"{' and '.join(names)} are not distinct layers")
    if len({id(tensor) for tensor in tensors}) != len(tensors):
        raise NotFusable(f"{' and '.join(names)} share a tensor")
    with_bias = [name for name, linear in zip(names, linears, strict=True) if linear.bias is not None]
    if with_bias and len(with_bias) != len(names):
        rest = [name for name in names if name not in with_bias]
        raise NotFusable(f"{' and '.join(with_bias)} has a bias and {' and '.join(rest)} has none")


def require_free_names(module: nn.Module, names: tuple[str, ...]) -> None:
    """Raises NotFusable if a new attribute of the module would hide one that it has."""
    for name in names:
        if hasattr(module, name):
            raise NotFusable(f"the module has an attribute `{name}` already")


def other_use(trace: Trace, node: fx.Node) -> tuple[fx.Node, str] | None:
    """The node and the reason if the traced forward uses the child that `node` calls for anything but this one call."""
    name = str(node.target)
    if node.op != "call_module":
        return node, f"`{node.name}` is no call of a child"
    calls = [other for other in trace.graph.nodes if other.op == "call_module" and other.target == node.target]
    if len(calls) != 1:
        return calls[-1], f"`{name}` is called {len(calls)} times, so its weight cannot move into a merged layer"
    for other in trace.graph.nodes:
        if other.op == "get_attr" and str(other.target).startswith(f"{name}."):
            return other, f"the forward reads `{other.target}` beside calling `{name}`"
    read = next((path for path in trace.reads if path.startswith(f"{name}.")), None)
    return None if read is None else (node, f"the forward reads `{read}` beside calling `{name}`")


def activation_of(module: nn.Module, node: fx.Node, traced: str) -> str | None:
    """What the activation that `node` calls computes in this instance; `traced` where it is a function, the same for all."""
    if node.op != "call_module":
        return traced
    try:
        return module_activation(module.get_submodule(str(node.target)))
    except AttributeError:
        return None


def linears_above(node: Any, trace: Trace) -> list[fx.Node]:
    """Plain linears nearest above `node` on every path along which numbers flow; a shape that is read is no number."""
    found: list[fx.Node] = []
    seen: set[fx.Node] = set()
    stack = [node] if isinstance(node, fx.Node) else []
    while stack:
        current = stack.pop()
        if current in seen or canonical(current) in _SHAPE_READS:
            continue
        seen.add(current)
        if current.op == "call_module" and is_plain_linear(trace.module.get_submodule(str(current.target))):
            found.append(current)
        else:
            stack.extend(current.all_input_nodes)
    return found


def only_input(node: fx.Node) -> Any:
    """What a call of one argument was given, by position or by keyword; None if it has not one argument."""
    given = (*node.args, *node.kwargs.values())
    return given[0] if len(given) == 1 else None
