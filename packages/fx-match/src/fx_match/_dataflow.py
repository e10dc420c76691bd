"""Which node each tensor object is: the dataflow of a trace, kept by the identity of objects.

Every tensor that an operation returns is tied to its node, or to a part of its node's value; a tensor that is met for the
first time is stored state, and becomes a `get_attr` node. Version counters, which a tensor shares with its views, tell
which tensors an operation wrote into.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from fx_match._facts import UNKNOWN
from fx_match._sizes import Size, plain
from fx_match._source import Location
from fx_match._structure import Path, map_leaves, tensors_in


@dataclass(slots=True)
class Notes:
    """What is known of each node."""

    values: dict[fx.Node, object] = field(default_factory=dict)
    locations: dict[fx.Node, Location] = field(default_factory=dict)
    projections: set[fx.Node] = field(default_factory=set)
    written: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    """Nodes whose tensor was written in place while it kept its name, and the nodes that wrote."""


@dataclass(slots=True)
class _Tied:
    """A tensor of the trace, kept alive since its identity is its name: a node, or a part of a node's value."""

    tensor: torch.Tensor
    version: int
    node: fx.Node | None
    parent: fx.Node | None = None
    path: Path = ()


class Dataflow:
    """Nodes, and the objects of the running forward that stand for them."""

    def __init__(self, module: nn.Module, locate: Callable[[], Location]) -> None:
        self.graph = fx.Graph()
        self.notes = Notes()
        self.constants: dict[str, torch.Tensor] = {}
        self.device: torch.device | None = None
        self.state_reads: dict[int, Location] = {}
        self._locate = locate
        self._states = {id(tensor): (name, tensor) for name, tensor in named_states(module)}
        self._tied: dict[int, _Tied] = {}
        self._wholes: dict[int, tuple[object, fx.Node]] = {}
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._writers: dict[int, fx.Node] = {}

    # From nodes to objects

    def note(self, node: fx.Node, value: object, *, location: Location | None = None) -> fx.Node:
        """Set down the node's value and where it was made, which is here and now unless said otherwise."""
        self.notes.values[node] = value
        self.notes.locations[node] = location or self._locate()
        node.meta["val"] = value
        return node

    def tie(self, value: Any, node: fx.Node) -> None:
        """Let `value`, and every tensor in it, stand for `node` and its parts from now on."""
        if isinstance(value, tuple) and value:  # a list or a dict may be changed before it is passed on
            self._wholes[id(value)] = (value, node)
        for path, tensor in tensors_in(value):
            whole = None if path else node
            self._tied[id(tensor)] = _Tied(tensor, self.version(tensor), whole, node, path)

    def renamed(self, result: Any, inputs: set[int]) -> Any:
        """`result` with each tensor that is an input itself replaced by another object on the same storage.

        `x.contiguous()` may return `x`; since identity is what names a value, input and output must be two objects.
        """
        alias = torch.ops.aten.alias.default

        def rename(value: Any) -> Any:
            return alias(value) if isinstance(value, torch.Tensor) and id(value) in inputs else value

        return map_leaves(rename, result)

    # From objects to arguments of nodes

    def argument(self, value: Any) -> Any:
        """What stands for `value` in a node's arguments: the node of a tensor or size, anything else itself."""
        if isinstance(value, Size):
            return value.make_node() if value.is_of(self) else value.plain
        return self.node_of(value) if isinstance(value, torch.Tensor) else value

    def arguments(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([map_leaves(self.argument, value, self._whole) for value in args])

    def keywords(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {name: map_leaves(self.argument, value, self._whole) for name, value in kwargs.items()}

    def _whole(self, container: Any) -> fx.Node | None:
        """The node of a tuple that is the very object that an input or a call gave."""
        known = self._wholes.get(id(container))
        return known[1] if known is not None else None

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        tied = self._tied.get(id(tensor))
        if tied is None:
            return self._state_node(tensor)
        if tied.node is None:
            assert tied.parent is not None
            tied.node = self._projection(tied.parent, tied.path, tensor)
        version = self.version(tensor)
        if version != tied.version:  # written through another object on the same storage
            writer = self._writers.get(_storage(self.twin(tensor)), self._writers.get(_storage(tensor)))
            self.mark_written(tied.node, writer if writer is not None else tied.node)
            tied.version = version
        return tied.node

    def is_computed(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is an input or was made in the trace: not a parameter, buffer or constant."""
        tied = self._tied.get(id(tensor))
        return tied is not None and (tied.node is None or tied.node.op != "get_attr")

    def part_maker(self, parent: fx.Node, key: Any, value: object) -> Callable[[], fx.Node]:
        """Makes the node of `parent[key]`, once it is asked for."""
        return lambda: self._projection(parent, (("item", key),), value)

    def _projection(self, parent: fx.Node, path: Path, value: object) -> fx.Node:
        """The node for a part of a tuple, mapping or dataclass, right behind the node of the whole."""
        node = parent
        for kind, key in path:
            function: Any = operator.getitem if kind == "item" else getattr
            made = (user for user in node.users if user in self.notes.projections and user.args == (node, key))
            step = next(made, None)
            if step is None:
                last = node
                while last.next in self.notes.projections and last.next.args[0] is node:
                    last = last.next
                with self.graph.inserting_after(last):
                    step = self.graph.call_function(function, (node, key))
                self.notes.projections.add(step)
                place = self.notes.locations[node]
                place = Location(None, place.file, place.line, place.function, place.helper_span)
                whole: Any = self.notes.values[node]
                self.note(step, plain(function(whole, key)) if whole is not UNKNOWN else value, location=place)
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
        self.note(node, tensor, location=self.state_reads.get(id(tensor)))
        self._tied[id(tensor)] = _Tied(tensor, self.version(tensor), node)
        return node

    def is_unread_state(self, tensor: object) -> bool:
        """Whether this is a parameter or buffer that has no node yet."""
        return id(tensor) in self._states and id(tensor) not in self._tied

    # From objects to operands on meta

    def operand(self, value: Any) -> Any:
        """What is computed with in place of `value`: meta tensors, plain numbers, the meta device."""
        if isinstance(value, Size):
            return value.plain
        if isinstance(value, torch.Tensor):
            return self.twin(value)
        if isinstance(value, torch.device) and value == self.device:
            return torch.device("meta")
        return value

    def operand_with_data(self, value: Any) -> Any:
        """The same where all tensors have data of their own, made in the trace: they may be looked into."""
        return value if isinstance(value, torch.Tensor) else self.operand(value)

    def have_data(self, tensors: list[torch.Tensor]) -> bool:
        return bool(tensors) and all(not tensor.is_meta and self.is_computed(tensor) for tensor in tensors)

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The meta tensor that stands for a real one, so that state is never computed with and never changed."""
        if tensor.is_meta:
            return tensor
        known = self._twins.get(id(tensor))
        if known is None:
            known = self._twins[id(tensor)] = (tensor, meta_like(tensor))
        return known[1]

    # Writes

    def version(self, tensor: torch.Tensor) -> int:
        """Counts the writes into a tensor or into anything that shares its storage, and into its twin."""
        known = self._twins.get(id(tensor))
        return _counter(tensor) + (_counter(known[1]) if known is not None else 0)

    def settle(self, written: list[torch.Tensor]) -> None:
        """The tensors that an operation has just written into are still its own arguments, not stale ones."""
        for tensor in written:
            tied = self._tied.get(id(tensor))
            if tied is not None:
                tied.version = self.version(tensor)

    def wrote(self, tensors: list[torch.Tensor], node: fx.Node, result: Any) -> None:
        """`node` wrote into `tensors`: those that it returns are the node from now on, the others are marked."""
        returned = {id(tensor) for _, tensor in tensors_in(result)}
        for tensor in tensors:
            for storage in (_storage(tensor), _storage(self.twin(tensor))):
                self._writers[storage] = node
            tied = self._tied.get(id(tensor))
            if id(tensor) in returned:
                continue
            if id(self.twin(tensor)) in returned:  # computed with the twin of a real tensor: both are the result now
                self._tied[id(tensor)] = _Tied(tensor, self.version(tensor), node)
            elif tied is not None and tied.node is not None:
                tied.version = self.version(tensor)
                self.mark_written(tied.node, node)

    def mark_written(self, node: fx.Node, by: fx.Node) -> None:
        writers = self.notes.written.setdefault(node, [])
        if by not in writers:
            writers.append(by)


def named_states(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers with their paths."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor with the size, stride, dtype and `requires_grad` of `tensor`."""
    twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return twin.requires_grad_() if tensor.requires_grad else twin


def _counter(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
