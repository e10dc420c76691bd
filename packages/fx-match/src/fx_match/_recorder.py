"""The running trace: executes a forward on meta tensors and writes down each operation as a graph node.

The forward runs for real, with tensors that have shapes and no data, so whatever Python does with them (isinstance,
unpacking, containers, caches, early returns) works as it always does. A `TorchFunctionMode` sees every torch call; the
tensor objects themselves carry the dataflow, by identity.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils._python_dispatch import TorchDispatchMode

from fx_match._facts import MISSING, UNKNOWN, Guard
from fx_match._hooks import original_module_call
from fx_match._sizes import Number, Size, make_size, plain, size_expression
from fx_match._source import FrameReader, Location
from fx_match._structure import Path, map_leaves, tensors_in

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
# Reads that are facts about the device and the type of a tensor, not about its shape; no node is made for them.
_SIZE_METHODS = {"size", "numel", "nelement", "__len__"}
_QUIET_READS = {"requires_grad", "grad", "grad_fn", "is_leaf", "names", "layout", "_version"}
_MUTATORS = {"__setitem__", "__set__"}


@dataclass(slots=True)
class _Tracked:
    """A tensor of the trace: the object (kept alive, since identity is what names it) and the node that it is."""

    tensor: torch.Tensor
    version: int
    node: fx.Node | None = None
    parent: fx.Node | None = None
    path: Path = ()


@dataclass(slots=True)
class Notes:
    """What is known of each node."""

    values: dict[fx.Node, object] = field(default_factory=dict)
    locations: dict[fx.Node, Location] = field(default_factory=dict)
    projections: set[fx.Node] = field(default_factory=set)
    written: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    """Nodes whose tensor was written in place while it kept its name, and the nodes that wrote."""


class Recorder(TorchFunctionMode):
    """Records one forward of `module`; see `fx_match._tracing` for how it is driven."""

    def __init__(self, module: nn.Module, frames: FrameReader, leaves: Mapping[Any, Callable[..., Any] | None]) -> None:
        super().__init__()
        self.module = module
        self.frames = frames
        self.leaves = leaves
        self.graph = fx.Graph()
        self.notes = Notes()
        self.guards: dict[tuple[object, ...], Guard] = {}
        self.reads: dict[str, object] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.device: torch.device | None = None
        self.active = False
        self._tracked: dict[int, _Tracked] = {}
        self._wholes: dict[int, tuple[object, fx.Node]] = {}
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._paths = {id(child): name for name, child in module.named_modules()}
        self._states = {id(tensor): (name, tensor) for name, tensor in _named_states(module)}
        self._state_reads: dict[int, Location] = {}
        self._state_on_meta = all(tensor.is_meta for _, tensor in self._states.values())
        self._leaf_classes = [key for key in leaves if isinstance(key, type) and issubclass(key, nn.Module)]

    # Running code that is not to be recorded

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before

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
            if name in _SIZE_METHODS and isinstance(args[0] if args else None, torch.Tensor):
                return self._size_method(func, name, args, kwargs)
            return self._operation(func, name, args, kwargs)

    def _operation(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def make_node() -> fx.Node:
            return self._torch_node(func, name, self._as_arguments(args), self._as_kwargs(kwargs))

        def run() -> Any:
            return func(*map_leaves(self._as_operand, args), **map_leaves(self._as_operand, self._on_meta(kwargs)))

        inplace = name in _MUTATORS or (name.endswith("_") and not name.endswith("__"))
        return self._record(make_node, run, (args, kwargs), always=inplace, read=f"{name}()")

    def _torch_node(self, func: Any, name: str, args: Any, kwargs: Any) -> fx.Node:
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
        value = func(self._as_operand(tensor))
        if name == "shape":
            return self._shape(tensor, value, lambda node: self.graph.call_function(getattr, (node, "shape")))
        if isinstance(value, torch.Tensor):
            return self._record(
                lambda: self.graph.call_function(getattr, (self._as_argument(tensor), name)), lambda: value, tensor
            )
        if self.device is not None and self._is_computed(tensor):
            if name == "device":
                value = self.device
            elif name in ("is_cuda", "is_meta", "is_cpu", "is_xpu", "is_mps"):
                value = self.device.type == name[3:]
        if name not in _QUIET_READS:
            self._value_guard(tensor, name, value)
        return value

    def _shape(self, tensor: torch.Tensor, value: torch.Size, make: Callable[[fx.Node], fx.Node]) -> torch.Size:
        """`value` with provenance, unless the tensor is a parameter or buffer: its shape is a fact about the module."""
        if not self._is_computed(tensor):
            return value
        node = self._note(make(self._as_argument(tensor)), value)
        entries: list[Any] = []
        for index, length in enumerate(value):
            expr = f"{self._node_of(tensor).name}.shape[{index}]"
            entries.append(make_size(length, self, self._projection_maker(node, (("item", index),), length), expr))
        shape = torch.Size(entries)
        self._wholes[id(shape)] = (shape, node)
        return shape

    def _size_method(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        value = func(self._as_operand(tensor), *map_leaves(plain, args[1:]), **map_leaves(plain, kwargs))
        source = self._node_of(tensor) if self._is_computed(tensor) else None
        if source is None:
            return value
        if name == "__len__":  # len() gives a plain int to the forward, whatever is returned here
            self.size_guard(f"len({source.name})", value, None)
            return value

        def make(node: fx.Node) -> fx.Node:
            return self.graph.call_method(name, (node, *self._as_arguments(args[1:])), self._as_kwargs(kwargs))

        if isinstance(value, torch.Size):
            return self._shape(tensor, value, make)
        node = self._note(make(source), value)
        text = ", ".join(str(plain(part)) for part in (*args[1:], *kwargs.values()))
        return make_size(value, self, lambda: node, f"{source.name}.{name}({text})")

    # Leaves

    def is_leaf_module(self, module: nn.Module) -> bool:
        return module is not self.module and id(module) in self._paths

    def call_leaf_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = self._paths[id(module)]
        meta = next((self.leaves[key] for key in self._leaf_classes if isinstance(module, key)), None)

        def run() -> Any:
            operands, options = map_leaves(self._as_operand, args), map_leaves(self._as_operand, kwargs)
            if meta is not None:
                return meta(module, *operands, **options)
            if self._state_on_meta:
                return original_module_call()(module, *operands, **options)
            state = {name: self._twin(tensor) for name, tensor in _named_states(module)}
            return torch.func.functional_call(module, state, operands, options)

        with self.suspended():
            return self._record(
                lambda: self.graph.call_module(path, self._as_arguments(args), self._as_kwargs(kwargs)),
                run,
                (args, kwargs),
                always=True,
            )

    def call_leaf_function(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.suspended():
            return self._leaf(function, self.leaves[function] or function, args, kwargs)

    def _leaf(self, function: Any, meta: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._record(
            lambda: self.graph.call_function(function, self._as_arguments(args), self._as_kwargs(kwargs)),
            lambda: meta(*map_leaves(self._as_operand, args), **map_leaves(self._as_operand, kwargs)),
            (args, kwargs),
            always=True,
        )

    # Recording

    def _record(
        self,
        make_node: Callable[[], fx.Node],
        run: Callable[[], Any],
        inputs: Any,
        *,
        always: bool = False,
        read: str | None = None,
    ) -> Any:
        """Run, make the node if the result holds tensors (or `always`), and tie the tensors of the result to it."""
        tensors = [tensor for _, tensor in tensors_in(inputs)]
        operands = [self._as_operand(tensor) for tensor in tensors]
        before = [_version(operand) for operand in operands]
        try:
            result = run()
        except Exception:
            self._note(make_node(), UNKNOWN)  # the node that could not be computed is the last of a partial trace
            raise
        found = list(tensors_in(result))
        written = [
            (tensor, operand)
            for tensor, operand, version in zip(tensors, operands, before, strict=True)
            if _version(operand) != version
        ]
        if not found and not written and not always:
            if read is not None and any(self._is_computed(tensor) for tensor in tensors):
                self._value_guard(next(tensor for tensor in tensors if self._is_computed(tensor)), read, result)
            return result
        node = make_node()
        returned = {id(tensor) for _, tensor in found}
        for tensor, operand in written:
            if id(operand) not in returned:
                self._mark_written(self._node_of(tensor), node)
        fresh = {id(operand) for _, operand in written}
        result = self._renamed(result, {id(operand) for operand in operands} - fresh)
        self._note(node, result)
        self._tie(result, node)
        for tensor, operand in written:
            if id(tensor) != id(operand):  # a real tensor, executed as its meta twin
                self._tracked.pop(id(tensor), None)
            if (entry := self._tracked.get(id(operand))) is not None:
                entry.version = _version(operand)
        return result

    def _renamed(self, result: Any, inputs: set[int]) -> Any:
        """`result` with every tensor that is an input itself replaced by another object on the same storage.

        `x.contiguous()` may return `x`; the dataflow is kept by identity, so input and output must be two objects.
        """

        def rename(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and id(value) in inputs:
                return torch.ops.aten.alias.default(value)
            return value

        return map_leaves(rename, result)

    def _note(self, node: fx.Node, value: object, *, location: Location | None = None) -> fx.Node:
        self.notes.values[node] = value
        self.notes.locations[node] = location or self.frames.locate(sys._getframe(1))
        node.meta["val"] = value
        return node

    def _tie(self, value: Any, node: fx.Node) -> None:
        """Let `value`, and every tensor in it, stand for `node` and its parts."""
        if type(value) is tuple and value:  # a list or a dict may be changed before it is passed on
            self._wholes[id(value)] = (value, node)
        for path, tensor in tensors_in(value):
            self._track(tensor, node, path)

    def _track(self, tensor: torch.Tensor, node: fx.Node, path: Path) -> None:
        if path:
            self._tracked[id(tensor)] = _Tracked(tensor, _version(tensor), parent=node, path=path)
        else:
            self._tracked[id(tensor)] = _Tracked(tensor, _version(tensor), node=node)

    def _mark_written(self, node: fx.Node, by: fx.Node) -> None:
        self.notes.written.setdefault(node, []).append(by)

    # From objects of the forward to arguments of nodes, and to operands on meta

    def _as_argument(self, value: Any) -> Any:
        if isinstance(value, Size):
            return value.make_node() if value.recorder is self else value.plain
        return self._node_of(value) if isinstance(value, torch.Tensor) else value

    def _as_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {name: map_leaves(self._as_argument, value, self._whole) for name, value in kwargs.items()}

    def _as_arguments(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([map_leaves(self._as_argument, value, self._whole) for value in args])

    def _whole(self, container: Any) -> fx.Node | None:
        """The node of a tuple that is the very object that an input or a call gave."""
        known = self._wholes.get(id(container))
        return known[1] if known is not None else None

    def _as_operand(self, value: Any) -> Any:
        if isinstance(value, Size):
            return value.plain
        return self._twin(value) if isinstance(value, torch.Tensor) and not value.is_meta else value

    def _on_meta(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if self.device is not None and kwargs.get("device") is not None:
            return {**kwargs, "device": "meta"}
        return kwargs

    def _node_of(self, tensor: torch.Tensor) -> fx.Node:
        entry = self._tracked.get(id(tensor))
        if entry is None:
            return self._state_node(tensor)
        if entry.node is None:
            assert entry.parent is not None
            entry.node = self._projection(entry.parent, entry.path, tensor)
        if _version(tensor) != entry.version:
            self._mark_written(entry.node, self._last_node())
            entry.version = _version(tensor)
        return entry.node

    def _last_node(self) -> fx.Node:
        last: fx.Node = next(iter(reversed(self.graph.nodes)))
        return last

    def _projection_maker(self, parent: fx.Node, path: Path, value: object) -> Callable[[], fx.Node]:
        made: list[fx.Node] = []

        def make() -> fx.Node:
            if not made:
                made.append(self._projection(parent, path, value))
            return made[0]

        return make

    def _projection(self, parent: fx.Node, path: Path, value: object) -> fx.Node:
        """The node for a part of a tuple, mapping or dataclass, right behind the node of the whole."""
        node = parent
        for kind, key in path:
            function: Any = operator.getitem if kind == "item" else getattr
            existing = (user for user in node.users if user in self.notes.projections and user.args == (node, key))
            step = next(existing, None)
            if step is None:
                last = node
                while last.next in self.notes.projections and last.next.args[0] is node:
                    last = last.next
                with self.graph.inserting_after(last):
                    step = self.graph.call_function(function, (node, key))
                self.notes.projections.add(step)
                whole = self.notes.locations[node]
                own = Location(None, whole.file, whole.line, whole.function, whole.helper_span)
                whole_value: Any = self.notes.values[node]
                part = function(whole_value, key) if step is not None and whole_value is not UNKNOWN else value
                self._note(step, plain(part), location=own)
            node = step
        return node

    def _state_node(self, tensor: torch.Tensor) -> fx.Node:
        """A `get_attr` node for a parameter, a buffer, or any other tensor that the forward did not make itself."""
        known = self._states.get(id(tensor))
        if known is not None:
            path = known[0]
        else:
            path = f"_constant_{len(self.constants)}"
            self.constants[path] = tensor
        node = self.graph.create_node("get_attr", path)
        self._note(node, tensor, location=self._state_reads.get(id(tensor)))
        self._track(tensor, node, ())
        return node

    def _is_computed(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor depends on the inputs, so far as its node tells: not a parameter, buffer or constant."""
        entry = self._tracked.get(id(tensor))
        return entry is not None and (entry.node is None or entry.node.op != "get_attr")

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The meta tensor that stands for a real one wherever the trace executes."""
        if tensor.is_meta:
            return tensor
        known = self._twins.get(id(tensor))
        if known is None:
            known = self._twins[id(tensor)] = (tensor, meta_like(tensor))
        return known[1]

    def add_placeholder(self, name: str, value: Any, location: Location) -> None:
        node = self.graph.placeholder(name)
        self._note(node, value, location=location)
        self._tie(value, node)

    def argument(self, value: Any) -> Any:
        """The node of a returned tensor or size; other values as they are."""
        return self._as_argument(value)

    # Guards and reads

    def size_arithmetic(self, function: Callable[..., Any], operands: tuple[Any, ...], value: Number) -> Any:
        with self.suspended():
            node = self.graph.call_function(function, self._as_arguments(operands))
            self._note(node, value)
            return make_size(value, self, lambda: node, size_expression(function, operands))

    def size_guard(self, expr: str, value: object, outcome: bool | None) -> None:
        self._add_guard("size", expr, expr, plain(value), outcome)

    def _value_guard(self, tensor: torch.Tensor, name: str, value: object) -> None:
        self._add_guard("value", name, f"{self._node_of(tensor).name}.{name}", value, None)

    def _add_guard(self, kind: Any, name: str, expr: str, value: object, outcome: bool | None) -> None:
        span = self.frames.locate(sys._getframe(1)).span
        self.guards.setdefault((kind, expr, span, outcome), Guard(kind, name, expr, value, span, outcome))

    def attribute_read(self, module: nn.Module, name: str, value: object) -> None:
        if name in _MODULE_MACHINERY or isinstance(value, (torch.Tensor, nn.Module)):
            return
        state: dict[str, Any] = object.__getattribute__(module, "__dict__")
        if callable(value) and name not in state:  # a method
            return
        self._add_read(module, name, value)

    def attribute_missed(self, module: nn.Module, name: str) -> None:
        """Plain lookup failed: a parameter, a buffer, a child, a None registered for one of these, or nothing."""
        state: dict[str, Any] = object.__getattribute__(module, "__dict__")
        for registry in ("_parameters", "_buffers", "_modules"):
            if name in state.get(registry, ()):
                value = state[registry][name]
                if value is None:
                    self._add_read(module, name, None)
                elif id(value) in self._states and id(value) not in self._tracked:
                    self._state_reads[id(value)] = self.frames.locate(sys._getframe(1))
                return
        self._add_read(module, name, MISSING)

    def _add_read(self, module: nn.Module, name: str, value: object) -> None:
        path = self._paths.get(id(module))
        if path is None:
            return
        full = f"{path}.{name}" if path else name
        self.reads.setdefault(full, value)
        self._add_guard("attribute", full, f"self.{full}", value, None)


class Underneath(TorchDispatchMode):
    """Records the ATen operations that reach the dispatcher past the function mode: TorchScript, C++ extensions.

    Without it their results would come out of nowhere, and the meta kernels that are written in Python would be taken
    for code of the forward.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._recorder.active:
            return func(*args, **(kwargs or {}))
        return self._recorder.__torch_function__(func, types, args, kwargs)


_MODULE_MACHINERY = frozenset(vars(nn.Module())) - {"training"} | {"_compiled_call_impl", "_version"}


def _named_states(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor with the size, stride, dtype and `requires_grad` of `tensor`."""
    twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return twin.requires_grad_() if tensor.requires_grad else twin
