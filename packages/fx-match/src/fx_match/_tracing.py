"""`trace`: run a module's forward on meta tensors and get its graph, with values, spans, guards and reads."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from fx_match._dataflow import Notes, meta_like
from fx_match._errors import TraceInputError
from fx_match._facts import UNKNOWN, Guard, LeafCall, Stop, Unknown
from fx_match._hooks import function_hooks, guarded_range, module_hooks, receiving
from fx_match._recorder import Recorder, Underneath
from fx_match._source import FrameReader, Location, SourceSpan, undecorated
from fx_match._stores import stored_names
from fx_match._structure import holds_tensor, map_leaves, output_structure


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A traced forward.

    graph: placeholders for the inputs that hold tensors; `get_attr` for parameters and buffers; `call_module` for child
        modules; `call_function` and `call_method` for the rest; `output` if the trace is complete.
    complete: False if the forward could not be followed to its end; then `stop` says where and why.
    guards: what the path of the forward hung on, in the order of the first occurrence.
    reads: each plain attribute that the forward read, by its name below the module, with its value (`MISSING` where the
        module has none). Methods, child modules and tensors are left out.
    output: what the forward returned, with nodes for tensors; mappings and dataclasses as plain dicts.
    given: the parameters of the forward that held no tensor when it began, with their values: what a decorator passed on, or defaults.
    constants: tensors that are no parameter or buffer, by the target of their `get_attr` node.
    changes: names, as in `reads`, of the plain attributes that the forward set to something else, and of the lists, dicts and
        sets among them whose entries it changed; and of those that it read and that its code sets on some path: its next run may
        read another value.
    """

    graph: fx.Graph
    complete: bool
    stop: Stop | None
    guards: tuple[Guard, ...]
    reads: Mapping[str, object]
    output: Any
    module: nn.Module
    module_class: type[nn.Module]
    code: types.CodeType
    given: Mapping[str, object]
    constants: Mapping[str, torch.Tensor]
    changes: frozenset[str]
    _notes: Notes = field(repr=False)
    _again: Callable[[Sequence[LeafCall]], Trace] = field(repr=False)

    def value(self, node: fx.Node) -> object | Unknown:
        """The node's value, tensors on meta; `UNKNOWN` for the node at which a partial trace stopped."""
        return self._notes.values.get(node, UNKNOWN)

    def span(self, node: fx.Node) -> SourceSpan | None:
        """The expression in the forward that made the node; for a node made in a helper, the call that led there.

        None for placeholders, for the output, and for the parts of a returned tuple (`a, b = f(x)`): those have no
        expression of their own.
        """
        return self.location(node).span

    def location(self, node: fx.Node) -> Location:
        return self._notes.locations.get(node, _NOWHERE)

    def spans_hit(self, span: SourceSpan) -> list[fx.Node]:
        """All nodes made at exactly this span, in order; several in a loop or in a helper with several operations."""
        return [node for node in self.graph.nodes if self.span(node) == span]

    def written_by(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Nodes that wrote into this node's tensor in place while later code went on using it."""
        return tuple(self._notes.written.get(node, ()))

    def with_leaves(self, leaves: Sequence[LeafCall]) -> Trace:
        """The same call of the same module, traced anew with `leaves` beside those that this trace has; its nodes are new."""
        return self._again(leaves)


_NOWHERE = Location(None, None, None, None, None)


def trace(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    leaves: Mapping[Callable[..., Any], Callable[..., Any]] | Sequence[LeafCall] = (),
    method: str = "forward",
) -> Trace:
    """Trace `module.forward(*args, **kwargs)`.

    args, kwargs: the values with which the module is really called. Tensors, and tuples, lists and dicts that hold
        tensors, become placeholders; whatever device they are on, the trace runs on meta and moves no data. All else
        (None, numbers, caches, configs) is passed as it is; an object that the forward changes is changed.
    leaves: functions, or `nn.Module` subclasses, whose calls become one node each with all their arguments, however
        the forward reaches them; each with the function that computes what the call returns (see `LeafCall`).
    method: the method to trace.

    Child modules are leaves. The module's own state is restored afterwards. Whatever the module does, an exception in
    it ends the trace (see `Trace.stop`) and is not raised.

    Raises TraceInputError, a TypeError, if `module` is no module, has no such Python method, the arguments do not bind,
    or a leaf is of a kind that cannot be intercepted.
    """
    if not isinstance(module, nn.Module):
        raise TraceInputError(f"trace() takes an nn.Module, found {type(module).__name__}")
    bound = getattr(module, method, None)
    function = undecorated(bound, method) if callable(bound) else None
    if bound is None or function is None:
        raise TraceInputError(f"{type(module).__name__} has no Python method named {method!r}")
    leaf_table = _leaf_table(leaves)
    frames = FrameReader(function.__code__)
    recorder = Recorder(module, frames, leaf_table)
    args, kwargs = tuple(args), dict(kwargs or {})
    recorder.flow.device = _common_device(args, kwargs)
    names = _argument_names(function, bound, module, args, kwargs, method)
    start = Location(None, function.__code__.co_filename, function.__code__.co_firstlineno, function.__name__, None)
    inputs = [(name, _on_meta(value)) for name, value in names]
    for name, value in inputs:
        if holds_tensor(value):
            recorder.add_placeholder(name, value, start)
    values = [value for _, value in inputs]
    call_args, call_kwargs = tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    stop, result = None, None
    hooked = [leaf for leaf in leaf_table if isinstance(leaf, types.FunctionType)]
    with contextlib.ExitStack() as stack:
        changes = stack.enter_context(_state_kept(module))
        stack.enter_context(function_hooks(hooked))
        stack.enter_context(guarded_range(function.__globals__))
        if torch.is_inference_mode_enabled():  # inference tensors have no version, so writes could not be seen
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        stack.enter_context(module_hooks())
        stack.enter_context(receiving(recorder))
        stack.enter_context(recorder)
        stack.enter_context(Underneath(recorder))
        given = stack.enter_context(_entered(function))
        try:
            recorder.active = True
            result = bound(*call_args, **call_kwargs)
        except Exception as error:
            stop = _stop(error, frames)
        finally:
            recorder.active = False
    output = None
    if stop is None:
        output = output_structure(recorder.flow.argument, result)
        recorder.graph.output(output)
    return Trace(
        graph=recorder.graph,
        complete=stop is None,
        stop=stop,
        guards=tuple(recorder.guards.values()),
        reads=types.MappingProxyType(recorder.reads),
        output=output,
        module=module,
        module_class=type(module),
        code=function.__code__,
        given=types.MappingProxyType(given),
        constants=types.MappingProxyType(recorder.flow.constants),
        changes=frozenset(changes) | _may_change(recorder.reads, type(module), function),
        _notes=recorder.flow.notes,
        _again=lambda more: trace(module, args, kwargs, leaves=[*_leaf_calls(leaves), *more], method=method),
    )


def _leaf_calls(leaves: Any) -> list[LeafCall]:
    return [LeafCall(*pair) for pair in leaves.items()] if isinstance(leaves, Mapping) else list(leaves)


def _leaf_table(leaves: Any) -> dict[Any, Callable[..., Any] | None]:
    pairs = [(leaf.function, leaf.meta) for leaf in _leaf_calls(leaves)]
    table: dict[Any, Callable[..., Any] | None] = {}
    for function, meta in pairs:
        function = getattr(function, "__func__", function)
        is_module = isinstance(function, type) and issubclass(function, nn.Module)
        is_torch = getattr(function, "__module__", "") is None or str(getattr(function, "__module__", "")).startswith(
            "torch"
        )
        if not (is_module or is_torch or isinstance(function, types.FunctionType)):
            raise TraceInputError(
                f"a leaf must be a Python function, a torch function or an nn.Module class, found {function!r}"
            )
        table[function] = meta
    return table


def _argument_names(
    function: types.FunctionType,
    bound: Callable[..., Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    method: str,
) -> list[tuple[str, Any]]:
    """A name for every argument, positional ones first, from the signature of the undecorated method."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    is_static = isinstance(inspect.getattr_static(module, method, None), staticmethod)
    receiver = () if is_static or not parameters else (module,)
    try:
        signature.bind(*receiver, *args, **kwargs)
    except TypeError as error:
        try:  # a decorator may take other arguments than the function that it wraps
            inspect.signature(bound, follow_wrapped=False).bind(*args, **kwargs)
        except (TypeError, ValueError):
            raise TraceInputError(f"{type(module).__name__}.{method}: {error}") from None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][len(receiver) :]
    names = [
        positional[index].name if index < len(positional) else f"args_{index - len(positional)}"
        for index in range(len(args))
    ]
    return [*zip(names, args, strict=True), *kwargs.items()]


@contextlib.contextmanager
def _entered(function: types.FunctionType) -> Iterator[dict[str, object]]:
    """A dict that holds, once the function has been called, its parameters without a tensor: what decorators have made of them by then."""
    code = function.__code__
    names = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) - set(
        code.co_varnames[: min(1, code.co_argcount)]
    )
    given: dict[str, object] = {}
    before = sys.getprofile()

    def see(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is code:
            _profile_with(before)
            values = frame.f_locals
            given.update({name: values[name] for name in names & values.keys() if not holds_tensor(values[name])})

    sys.setprofile(see)
    try:
        yield given
    finally:
        if sys.getprofile() is see:
            _profile_with(before)


def _profile_with(profiler: Any) -> None:
    """Give profiling back to what had it. One that is written in C, such as cProfile's, is known to Python as an object to be enabled."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
        return
    sys.setprofile(None)
    if hasattr(profiler, "enable"):
        profiler.enable()
    else:
        warnings.warn(
            f"{profiler!r} cannot be switched on again after a trace; it has seen what came before", stacklevel=2
        )


def _on_meta(value: Any) -> Any:
    if not holds_tensor(value):
        return value
    return map_leaves(lambda item: meta_like(item) if isinstance(item, torch.Tensor) else item, value)


def _common_device(args: Any, kwargs: Any) -> torch.device | None:
    """The device that the forward is to believe its tensors on: None for meta, or where the inputs disagree."""
    devices: set[torch.device] = set()
    map_leaves(lambda item: devices.add(item.device) if isinstance(item, torch.Tensor) else None, (args, kwargs))
    device = next(iter(devices)) if len(devices) == 1 else None
    return None if device is None or device.type == "meta" else device


_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
_CONTAINERS = (list, dict, set)


@contextlib.contextmanager
def _state_kept(module: nn.Module) -> Iterator[set[str]]:
    """Put back every attribute, parameter, buffer and child that the forward sets, adds or deletes, and the entries of containers.

    Gives a set that afterwards holds the names of the plain attributes that were changed.
    """
    kept = []
    for name, child in module.named_modules():
        state = vars(child)
        entries = {key: copy.copy(held) for key, held in state.items() if type(held) in _CONTAINERS}
        kept.append((name, state, dict(state), entries))
    changes: set[str] = set()
    try:
        yield changes
    finally:
        for name, state, before, entries in kept:
            for key in (before.keys() | state.keys()) - _REGISTRIES:
                is_same = key in before and key in state and state[key] is before[key]
                if not is_same or (key in entries and not _same_entries(before[key], entries[key])):
                    changes.add(f"{name}.{key}" if name else key)
            state.clear()
            state.update(before)
            for key, content in entries.items():
                _refill(state[key], content)


def _same_entries(now: Any, before: Any) -> bool:
    """Whether a container holds the very objects that it held."""
    if len(now) != len(before):
        return False
    if isinstance(now, set):
        return bool(now == before)
    pairs = zip(now.items(), before.items(), strict=True) if isinstance(now, dict) else zip(now, before, strict=True)
    if isinstance(now, dict):
        return all(one[0] == other[0] and one[1] is other[1] for one, other in pairs)
    return all(one is other for one, other in pairs)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def _may_change(reads: Mapping[str, object], cls: type, function: types.FunctionType) -> set[str]:
    """Of the attributes that were read, those that are set somewhere in the code, on a path that was not taken."""
    stored = stored_names(cls, function)
    return {name for name in reads if name.rpartition(".")[2] in stored}


def _stop(error: Exception, frames: FrameReader) -> Stop:
    location = frames.locate_traceback(error.__traceback__)
    return Stop(_reason(error), location.span, type(error).__name__, location)


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    message = text[0] if text else ""
    lowered = message.lower()
    if (
        "item()" in lowered
        or "cannot copy out of meta" in lowered
        or "boolean value of" in lowered
        or "nonzero" in lowered
    ):
        return f"the forward needs the data of a tensor, and the trace has shapes only: {message}"
    return f"{type(error).__name__}: {message}"
