"""The running trace: executes a forward on meta tensors and writes down each operation as a graph node.

The forward runs for real, with tensors that have shapes and no data, so whatever Python does with them (isinstance,
unpacking, containers, caches, early returns) works as it always does. A `TorchFunctionMode` sees every torch call, a
`TorchDispatchMode` what slips past it, and `Dataflow` knows which node each tensor is.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils._python_dispatch import TorchDispatchMode

from fx_match._dataflow import Dataflow, named_states
from fx_match._facts import MISSING, UNKNOWN, Guard
from fx_match._hooks import original_module_call
from fx_match._sizes import Number, make_size, plain, size_expression
from fx_match._source import FrameReader, Location, called_by_machinery
from fx_match._structure import map_leaves, tensors_in

# Dunder methods as they reach a torch function mode, and the operator that the source spelt; True: operands swapped.
_OPERATORS: dict[str, tuple[Callable[..., Any], bool]] = {
    "__getitem__": (operator.getitem, False),
    "__setitem__": (operator.setitem, False),
    "__rsub__": (operator.sub, True),
    "__rpow__": (operator.pow, True),
    "__rdiv__": (operator.truediv, True),
    "__rtruediv__": (operator.truediv, True),
    "__rfloordiv__": (operator.floordiv, True),
    "__rmod__": (operator.mod, True),
    "__rmatmul__": (operator.matmul, True),
    "__floordiv__": (operator.floordiv, False),
    "__eq__": (operator.eq, False),
    "__ne__": (operator.ne, False),
    "__and__": (operator.and_, False),
    "__or__": (operator.or_, False),
    "__xor__": (operator.xor, False),
    "__invert__": (operator.invert, False),
}
_SIZE_METHODS = frozenset({"size", "numel", "nelement", "__len__"})
_DEVICE_FLAGS = frozenset({"is_cuda", "is_cpu", "is_meta", "is_xpu", "is_mps"})
_QUIET_READS = frozenset({"requires_grad", "grad", "grad_fn", "is_leaf", "names", "layout", "_version"})
_MUTATORS = frozenset({"__setitem__", "__set__"})
_MODULE_MACHINERY = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl", "_version"}


class Recorder(TorchFunctionMode):
    """Records one forward of `module`; see `fx_match._tracing` for how it is driven."""

    def __init__(self, module: nn.Module, frames: FrameReader, leaves: Mapping[Any, Callable[..., Any] | None]) -> None:
        super().__init__()
        self.module = module
        self.leaves = leaves
        self.active = False
        self.guards: dict[tuple[object, ...], Guard] = {}
        self.reads: dict[str, object] = {}
        self._frames = frames
        self.flow = Dataflow(module, self._here)
        self.graph = self.flow.graph
        self._paths = {id(child): name for name, child in module.named_modules()}
        self._state_on_meta = all(tensor.is_meta for _, tensor in named_states(module))
        self._leaf_classes = [key for key in leaves if isinstance(key, type) and issubclass(key, nn.Module)]

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Run code that is not to be recorded."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before

    def _here(self) -> Location:
        return self._frames.locate(sys._getframe(1))

    # Torch calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        with self.suspended():
            if func in self.leaves:
                return self._leaf(func, self.leaves[func] or func, args, kwargs)
            name = getattr(func, "__name__", "")
            if name == "__get__":
                return self._property(func, args[0])
            if name in _SIZE_METHODS and args and isinstance(args[0], torch.Tensor):
                return self._size_method(func, name, args, kwargs)
            return self._operation(func, name, args, kwargs)

    def _operation(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
        convert = self.flow.operand_with_data if self.flow.have_data(tensors) else self.flow.operand

        def make_node() -> fx.Node:
            return self._torch_node(func, name, self.flow.arguments(args), self.flow.keywords(kwargs))

        def run() -> Any:
            return func(*map_leaves(convert, args), **map_leaves(convert, self._on_meta(kwargs)))

        inplace = name in _MUTATORS or (name.endswith("_") and not name.endswith("__"))
        result = self._record(make_node, run, tensors, convert, always=inplace, read=f"{name}()")
        if name == "unbind" and sys._getframe(2).f_code is torch.Tensor.__iter__.__code__:
            self.size_guard(f"len({self.flow.node_of(args[0]).name})", len(result), None)  # a loop over a tensor
        return result

    def _torch_node(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        if name == "__set__":
            return self.graph.call_function(setattr, (args[0], func.__self__.__name__, *args[1:]))
        if is_tensor_method_or_property(func):
            if name in _OPERATORS:
                function, swapped = _OPERATORS[name]
                return self.graph.call_function(function, args[::-1] if swapped else args, kwargs)
            return self.graph.call_method(name, args, kwargs)
        return self.graph.call_function(func, args, kwargs)

    def _property(self, func: Any, tensor: torch.Tensor) -> Any:
        name = func.__self__.__name__
        if name == "shape":
            value = func(self.flow.operand(tensor))
            return self._shape(tensor, value, lambda node: self.graph.call_function(getattr, (node, "shape")))
        convert = self.flow.operand_with_data if self.flow.have_data([tensor]) else self.flow.operand
        # What `data` gives has a version counter of its own, by which no write through it would be seen.
        value = convert(tensor).detach() if name == "data" else func(convert(tensor))
        if isinstance(value, torch.Tensor):
            make = lambda: self.graph.call_function(getattr, (self.flow.node_of(tensor), name))  # noqa: E731
            return self._record(make, lambda: value, [tensor], convert)
        if not self.flow.is_computed(tensor):
            return func(tensor)
        if self.flow.device is not None and name == "device":
            value = self.flow.device
        elif self.flow.device is not None and name in _DEVICE_FLAGS:
            value = self.flow.device.type == name.removeprefix("is_")
        if name not in _QUIET_READS:
            self._value_guard(tensor, name, value)
        return value

    def _shape(self, tensor: torch.Tensor, value: torch.Size, make: Callable[[fx.Node], fx.Node]) -> torch.Size:
        """`value` with provenance, unless the tensor is a parameter or buffer: its shape is a fact about the module."""
        if not self.flow.is_computed(tensor):
            return value
        source = self.flow.node_of(tensor)
        node = self.flow.note(make(source), value)
        shape = torch.Size(
            make_size(length, self, self.flow.part_maker(node, index, length), f"{source.name}.shape[{index}]")
            for index, length in enumerate(value)
        )
        self.flow.tie(shape, node)
        return shape

    def _size_method(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        value = func(self.flow.operand(tensor), *map_leaves(plain, args[1:]), **map_leaves(plain, kwargs))
        if not self.flow.is_computed(tensor):
            return value
        if name == "__len__":  # len() gives a plain int to the forward, whatever is returned here
            self.size_guard(f"len({self.flow.node_of(tensor).name})", value, None)
            return value

        def make(source: fx.Node) -> fx.Node:
            return self.graph.call_method(name, (source, *self.flow.arguments(args[1:])), self.flow.keywords(kwargs))

        if isinstance(value, torch.Size):
            return self._shape(tensor, value, make)
        source = self.flow.node_of(tensor)
        node = self.flow.note(make(source), value)
        text = ", ".join(str(plain(part)) for part in (*args[1:], *kwargs.values()))
        return make_size(value, self, lambda: node, f"{source.name}.{name}({text})")

    def _on_meta(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if self.flow.device is not None and kwargs.get("device") is not None:
            return {**kwargs, "device": "meta"}
        return kwargs

    # Leaves

    def is_leaf_module(self, module: nn.Module) -> bool:
        return module is not self.module and id(module) in self._paths

    def call_leaf_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = self._paths[id(module)]
        meta = next((self.leaves[key] for key in self._leaf_classes if isinstance(module, key)), None)
        convert = self.flow.operand

        def run() -> Any:
            operands, options = map_leaves(convert, args), map_leaves(convert, kwargs)
            if meta is not None:
                return meta(module, *operands, **options)
            if self._state_on_meta:
                return original_module_call()(module, *operands, **options)
            state = {name: self.flow.twin(tensor) for name, tensor in named_states(module)}
            return torch.func.functional_call(module, state, operands, options)

        def make_node() -> fx.Node:
            return self.graph.call_module(path, self.flow.arguments(args), self.flow.keywords(kwargs))

        with self.suspended():
            tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
            return self._record(make_node, run, tensors, convert, always=True)

    def call_leaf_function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.suspended():
            return self._leaf(function, self.leaves[function] or function, args, kwargs)

    def _leaf(self, function: Any, meta: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        convert = self.flow.operand
        return self._record(
            lambda: self.graph.call_function(function, self.flow.arguments(args), self.flow.keywords(kwargs)),
            lambda: meta(*map_leaves(convert, args), **map_leaves(convert, kwargs)),
            [tensor for _, tensor in tensors_in((args, kwargs))],
            convert,
            always=True,
        )

    def _record(
        self,
        make_node: Callable[[], fx.Node],
        run: Callable[[], Any],
        tensors: list[torch.Tensor],
        convert: Callable[[Any], Any],
        *,
        always: bool = False,
        read: str | None = None,
    ) -> Any:
        """Run, make the node if the result holds tensors (or `always`), and tie the tensors of the result to it.

        tensors: those among the arguments. convert: from them to what is computed with. read: what it is called if
        the result is a plain value that was read off a tensor.
        """
        flow = self.flow
        operands = [convert(tensor) for tensor in tensors]
        before = [flow.version(tensor) for tensor in tensors]
        try:
            result = run()
        except Exception:
            flow.note(make_node(), UNKNOWN)  # the node that could not be computed is the last of a partial trace
            raise
        written = [tensor for tensor, version in zip(tensors, before, strict=True) if flow.version(tensor) != version]
        if not always and not written and not any(True for _ in tensors_in(result)):
            source = next((tensor for tensor in tensors if flow.is_computed(tensor)), None)
            if read is not None and source is not None:
                self._value_guard(source, read, result)
            return result
        flow.settle(written)
        node = make_node()
        untouched = {id(operand) for operand, tensor in zip(operands, tensors, strict=True)}
        untouched -= {id(convert(tensor)) for tensor in written}
        result = flow.renamed(result, untouched)
        flow.note(node, result)
        flow.wrote(written, node, result)
        flow.tie(result, node)
        return result

    # Guards and reads

    def add_placeholder(self, name: str, value: Any, location: Location) -> None:
        node = self.flow.note(self.graph.placeholder(name), value, location=location)
        self.flow.tie(value, node)

    def size_arithmetic(self, function: Callable[..., Any], operands: tuple[Any, ...], value: Number) -> Any:
        with self.suspended():
            node = self.flow.note(self.graph.call_function(function, self.flow.arguments(operands)), value)
            return make_size(value, self, lambda: node, size_expression(function, operands))

    def size_guard(self, expr: str, value: object, outcome: bool | None) -> None:
        self._add_guard("size", expr, expr, plain(value), outcome)

    def _value_guard(self, tensor: torch.Tensor, name: str, value: object) -> None:
        if not called_by_machinery(sys._getframe(1)):
            self._add_guard("value", name, f"{self.flow.node_of(tensor).name}.{name}", value, None)

    def _add_guard(self, kind: Any, name: str, expr: str, value: object, outcome: bool | None) -> None:
        span = self._here().span
        self.guards.setdefault((kind, expr, span, outcome), Guard(kind, name, expr, value, span, outcome))

    def attribute_read(self, module: nn.Module, name: str, value: object) -> None:
        if name in _MODULE_MACHINERY or isinstance(value, (torch.Tensor, nn.Module)):
            return
        state: dict[str, Any] = object.__getattribute__(module, "__dict__")
        if not callable(value) or name in state:  # other callables are methods
            self._add_read(module, name, value)

    def attribute_missed(self, module: nn.Module, name: str) -> None:
        """Plain lookup failed: a parameter, a buffer, a child, a None registered for one of these, or nothing."""
        state: dict[str, Any] = object.__getattribute__(module, "__dict__")
        for registry in ("_parameters", "_buffers", "_modules"):
            if name in state.get(registry, ()):
                value = state[registry][name]
                if value is None:
                    self._add_read(module, name, None)
                elif self.flow.is_unread_state(value):
                    self.flow.state_reads[id(value)] = self._here()
                return
        self._add_read(module, name, MISSING)

    def _add_read(self, module: nn.Module, name: str, value: object) -> None:
        path = self._paths.get(id(module))
        if path is None:
            return
        full = f"{path}.{name}" if path else name
        self.reads.setdefault(full, plain(value))
        self._add_guard("attribute", full, f"self.{full}", plain(value), None)


class Underneath(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the ATen operations that reach the dispatcher past the function mode: TorchScript, C++ extensions.

    Without it their results would come out of nowhere, and the meta kernels that are written in Python would be taken
    for code of the forward.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import the whole of torch._dynamo, seconds, for a frame that is never compiled

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._recorder.active:
            return func(*args, **(kwargs or {}))
        return self._recorder.__torch_function__(func, types, args, kwargs)
