"""The head: what lies between the decoder's last hidden state and the logits, carried over from the traced forward of the head model.

In: the trace of a `...ForCausalLM`. Out: a `HeadPlan`, or the reason why an operation in it cannot be carried over. Scale, soft cap and
bias are read from the graph; no config name is looked at. Modules that stand before the projection run as they are, or as they are fused:
that they treat each token alone was seen when the whole model ran.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable

import torch
from fx_match import Trace, canonical
from torch import fx
from transformers import PreTrainedModel
from vllm_layers_bridge.specs import HeadLinearSpec

from tf_backend.plan.modules import plain_layer
from tf_backend.plan.places import place_of_class, place_of_line
from tf_backend.plan.refusals import REMEDY
from tf_backend.plan.schema import HeadPlan, HeadStep, Place, Refusal

HIDDEN = "last_hidden_state"
"""Entry of a decoder's output that the engine hands to the head."""

ENGINE_INPUTS = ("input_ids", "position_ids")
"""Arguments with which the engine calls the decoder."""

_ANY_VALUE = frozenset({"use_cache", "return_dict"})
"""Arguments for which the engine passes values of its own."""

_ARITHMETIC = frozenset({"mul", "div", "add", "sub"})
_UNARY = frozenset({"tanh", "neg"})


class _CannotCarry(Exception):
    def __init__(self, reason: str, node: fx.Node | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node


def plan_head(model: PreTrainedModel, trace: Trace, attending: Collection[str]) -> tuple[str, HeadPlan] | Refusal:
    """Read the head of `model` from the trace of its forward.

    Args:
        attending: names of the modules that call attention; the decoder is the module that the head calls and that holds them all.

    Returns:
        The full name of the decoder, e.g. ``model``, and the head; or why it cannot be carried over.
    """
    place = place_of_class(type(model))
    try:
        if (
            trace.output is None
            or not isinstance(trace.output, dict)
            or not isinstance(trace.output.get("logits"), fx.Node)
        ):
            why = f"its forward could not be followed: {trace.stop}" if trace.stop else "it returns no `logits`"
            raise _CannotCarry(why)
        projection = _projection_name(model)
        after, linear = _walk(trace, trace.output["logits"], lambda _: True)
        if linear.target != projection:
            raise _CannotCarry(f"its logits come from `{linear.target}` and not from `{projection}`", linear)
        before, decoder = _walk(trace, _argument(linear), lambda node: any(_lies_in(name, node) for name in attending))
        base = str(decoder.target)
        if not all(_lies_in(name, decoder) for name in attending):
            raise _CannotCarry(
                f"it calls `{base}`, which holds some of the layers, between the decoder and the logits", decoder
            )
        inside = next((step.module for step in before if step.module.startswith(f"{base}.")), None)
        if inside is not None:
            raise _CannotCarry(
                f"it calls `{inside}`, a part of the decoder, between the decoder and the logits", linear
            )
        _check_inputs(model, decoder)
        return base, HeadPlan(tuple(before), _spec(model, projection), tuple(after), place)
    except _CannotCarry as problem:
        return Refusal(
            f"the head of `{type(model).__name__}` cannot be carried over: {problem.reason}",
            "",
            _place_of(trace, problem.node) or place,
            REMEDY,
        )


def _projection_name(model: PreTrainedModel) -> str:
    projection = model.get_output_embeddings()
    modules: Iterable[tuple[str, torch.nn.Module]] = model.named_modules()
    for name, module in modules:
        if module is projection and type(module) is torch.nn.Linear:
            return name
    raise _CannotCarry("it has no plain linear as its output embeddings")


def _spec(model: PreTrainedModel, name: str) -> HeadLinearSpec:
    linear = model.get_submodule(name)
    assert isinstance(linear, torch.nn.Linear)
    embedding = model.get_input_embeddings()
    is_tied = getattr(embedding, "weight", None) is linear.weight
    tied_to = next(n for n, m in model.named_modules() if m is embedding) if is_tied else None
    if tied_to is not None and plain_layer(model, tied_to, embedding) is None:
        tied_to = None  # an embedding that scales stays as it is: the head then holds a copy of its weight
    return HeadLinearSpec(name, linear.out_features, linear.in_features, linear.bias is not None, tied_to)


def _walk(trace: Trace, node: fx.Node, is_end: Callable[[fx.Node], bool]) -> tuple[list[HeadStep], fx.Node]:
    """The nearest call of a child above `node` for which `is_end` holds, and the steps from there down to it, in order of execution."""
    steps: list[HeadStep] = []
    while node.op != "call_module" or not is_end(node):
        step, source = _call(trace, node) if node.op == "call_module" else _step(trace, node)
        if step is not None:
            steps.append(step)
        node = source
    _check_not_written(trace, node)
    return steps[::-1], node


def _lies_in(name: str, call: fx.Node) -> bool:
    """Whether the module of that full name is, or is within, the one that is called."""
    return f"{name}.".startswith(f"{call.target}.")


def _call(trace: Trace, node: fx.Node) -> tuple[HeadStep, fx.Node]:
    """A module that makes one value of one value, token by token."""
    inputs = node.all_input_nodes
    if len(inputs) != 1 or node.args != (inputs[0],) or node.kwargs:
        raise _CannotCarry(
            f"it calls `{node.target}` between the decoder and the logits, with more than one value", node
        )
    new, old = trace.value(node), trace.value(inputs[0])
    if not (isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor) and new.shape[:-1] == old.shape[:-1]):
        raise _CannotCarry(
            f"it calls `{node.target}` between the decoder and the logits, which gives no one value for each token",
            node,
        )
    _check_not_written(trace, node)
    return HeadStep("call", ("x",), str(node.target)), inputs[0]


def _check_not_written(trace: Trace, node: fx.Node) -> None:
    writers = trace.written_by(node)
    if writers:
        raise _CannotCarry(f"`{node.name}` is written to in place", writers[0])


def _step(trace: Trace, node: fx.Node) -> tuple[HeadStep | None, fx.Node]:
    """One operation of a single value, and that value; no step where it changes nothing."""
    inputs = node.all_input_nodes
    if node.op not in {"call_function", "call_method"} or len(inputs) != 1:
        raise _CannotCarry(f"`{node.name}` is computed from {len(inputs)} values", node)
    source = inputs[0]
    name = canonical(node)
    _check_not_written(trace, node)
    if name in _ARITHMETIC and len(node.args) == 2 and not _has_alpha(node):
        args = tuple("x" if arg is source else arg for arg in node.args)
        if args.count("x") == 1 and all(arg == "x" or isinstance(arg, int | float) for arg in args):
            return HeadStep(name, tuple(arg for arg in args if isinstance(arg, str | int | float))), source
    if name in _UNARY:
        return HeadStep(name, ("x",)), source
    if name == "cast":
        return _cast(trace, node, source), source
    if _is_unchanged(trace, node, source):
        return None, source
    raise _CannotCarry(f"`{node.name}` ({name}) is not an operation that it knows to carry over", node)


def _has_alpha(node: fx.Node) -> bool:
    return bool(node.kwargs)


def _cast(trace: Trace, node: fx.Node, source: fx.Node) -> HeadStep | None:
    new, old = trace.value(node), trace.value(source)
    if not (isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor)):
        raise _CannotCarry(f"the type that `{node.name}` casts to is not known", node)
    if new.dtype is torch.float32:
        return HeadStep("cast_float32", ("x",))
    if new.dtype is old.dtype:
        return None
    raise _CannotCarry(f"`{node.name}` casts to {new.dtype}", node)


def _is_unchanged(trace: Trace, node: fx.Node, source: fx.Node) -> bool:
    """Whether a selection or view gives all of its input: a part of a tuple, a slice of everything, `contiguous`."""
    new, old = trace.value(node), trace.value(source)
    name = canonical(node)
    if name in {"getitem", "getattr"} and not isinstance(old, torch.Tensor):
        path = _path(node)
        if path != (HIDDEN,):
            read = ".".join(str(part) for part in path)
            raise _CannotCarry(f"it reads `{read}` of the decoder's output and not `{HIDDEN}`", node)
        return True
    is_view = name in {"getitem", "contiguous", "slice"}
    return is_view and isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor) and new.shape == old.shape


def _path(node: fx.Node) -> tuple[object, ...]:
    """Keys by which a part of a module's output is picked."""
    if node.op == "call_module":
        return ()
    return (*_path(node.all_input_nodes[0]), node.args[1])


def _check_inputs(model: PreTrainedModel, decoder: fx.Node) -> None:
    """The engine calls the decoder with tokens and their positions alone: the head must do nothing else."""
    base = model.get_submodule(str(decoder.target))
    signature = inspect.signature(base.forward)
    bound = signature.bind(*decoder.args, **decoder.kwargs)
    passed = dict(bound.arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            passed.update(passed.pop(parameter.name, {}))
    for name, value in passed.items():
        is_own_input = isinstance(value, fx.Node) and value.op == "placeholder" and value.target == name
        is_left_out = (
            value is None or value is False or name in _ANY_VALUE or _is_default(value, signature.parameters.get(name))
        )
        if not (name in ENGINE_INPUTS and is_own_input) and not is_left_out:
            raise _CannotCarry(
                f"it passes `{name}` to `{decoder.target}`; the engine passes tokens and positions alone", decoder
            )
    missing = [name for name in ENGINE_INPUTS if name not in passed]
    if missing:
        raise _CannotCarry(f"it does not pass `{missing[0]}` on to `{decoder.target}`", decoder)


def _is_default(value: object, parameter: inspect.Parameter | None) -> bool:
    """Whether a plain value is what the decoder takes where nothing is passed."""
    if parameter is None or not isinstance(value, bool | int | float | str):
        return False
    return type(value) is type(parameter.default) and value == parameter.default


def _argument(node: fx.Node) -> fx.Node:
    (argument,) = node.all_input_nodes
    return argument


def _place_of(trace: Trace, node: fx.Node | None) -> Place | None:
    span = trace.span(node) if node is not None else None
    if span is None:
        return None
    return place_of_line(trace.module_class.__module__, trace.code.co_filename, span.lineno)
