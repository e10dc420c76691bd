"""Placement: how the weights and values of one module lie over tensor-parallel ranks.

In: the trace of a module, the layers its plan gives it, the ranks. Out: the same layers with their parallel styles, or the reason why the
module is computed whole on every rank.

Each value of the graph is replicated, or sharded along one axis. Placement starts from the projections that read a replicated input, takes
them as split on their outputs, and follows the values: through views, element-wise operations, norms over another axis,
attention over heads. It holds when every sharded value ends in a linear that takes its shards and sums over ranks, so that what the
module returns is whole again. Everything that it does not know ends it: the module then stays replicated, which is right and costs
memory and time, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import fx_match
import torch
from fx_match import CASTS, Trace, canonical
from torch import fx, nn
from vllm_layers_bridge.fusions.children import is_transposed_linear
from vllm_layers_bridge.fusions.protocol import is_plain_linear
from vllm_layers_bridge.seams.leaf import attention_leaf

_ELEMENTWISE = frozenset(
    {
        "add", "sub", "mul", "div", "neg", "abs", "pow", "square", "sqrt", "rsqrt", "exp", "tanh", "sigmoid", "silu", "gelu",
        "relu", "clamp", "softplus", "where", "maximum", "minimum", "reciprocal", "contiguous", "clone", "mish", "leaky_relu",
    }
    | CASTS
)  # fmt: skip
"""Each entry of the result depends on the entries of the operands at the same place, and on no other."""


@dataclass(frozen=True, slots=True)
class Shards:
    """A value split along `axis`, counted from the front, into equal runs, one for each rank."""

    axis: int


@dataclass(frozen=True, slots=True)
class Packed:
    """The output of a linear that holds several projections, each split for itself: `parts` are their columns."""

    parts: tuple[tuple[int, int], ...]


State = Shards | Packed | None


class Unplaced(Exception):
    """Why a module cannot be split, in a sentence."""


@dataclass(frozen=True, slots=True)
class Styles:
    """Which linears of a module are split on outputs and which on inputs, by name of the child."""

    column: frozenset[str]
    row: frozenset[str]
    attention: bool


def place(
    trace: Trace,
    ranks: int,
    heads: tuple[int, int] | None,
    packed: Mapping[str, tuple[tuple[int, int], ...]] | None = None,
) -> Styles:
    """Split the linears of a module over `ranks`.

    Args:
        trace: of the module's forward, as the model calls it.
        heads: query heads and key-value heads of the attention it calls, or None.
        packed: for each child that a merged layer takes in parts, the columns of the parts.

    Raises:
        Unplaced: with the reason.
    """
    if not trace.complete:
        raise Unplaced("its forward could not be followed to the end")
    return _Walk(trace, ranks, heads, packed or {}).run()


class _Walk:
    def __init__(
        self,
        trace: Trace,
        ranks: int,
        heads: tuple[int, int] | None,
        packed: Mapping[str, tuple[tuple[int, int], ...]],
    ) -> None:
        self.trace = trace
        self.ranks = ranks
        self.heads = heads
        self.packed = packed
        self.state: dict[fx.Node, State] = {}
        self.column: set[str] = set()
        self.row: set[str] = set()
        self.attended = False

    def run(self) -> Styles:
        for node in self.trace.graph.nodes:
            if node.op == "output":
                self._finish(node)
            else:
                self.state[node] = self._step(node)
        if not self.row:
            raise Unplaced("none of its linears takes what another one gives")
        return Styles(frozenset(self.column), frozenset(self.row), self.attended)

    def _finish(self, output: fx.Node) -> None:
        for node in output.all_input_nodes:
            if self.state.get(node) is not None:
                raise Unplaced(f"it returns `{node.name}`, which would be split over ranks")

    def _step(self, node: fx.Node) -> State:
        if self.trace.written_by(node):
            raise Unplaced(f"`{node.name}` is written to in place")
        if node.op == "placeholder":
            return None
        if node.op == "get_attr":
            return None
        if node.op == "call_module":
            return self._module(node)
        if node.target is attention_leaf:
            return self._attention(node)
        states = {source: state for source in node.all_input_nodes if (state := self.state[source]) is not None}
        if not states:
            return None
        packed = [state for state in states.values() if isinstance(state, Packed)]
        if packed:
            return self._part_of_packed(node, packed[0], len(states))
        return self._operation(node, {source: state for source, state in states.items() if isinstance(state, Shards)})

    # ---- child modules

    def _module(self, node: fx.Node) -> State:
        name = str(node.target)
        child = self.trace.module.get_submodule(name)
        states = [self.state[source] for source in node.all_input_nodes]
        sizes = linear_sizes(child)
        if any(isinstance(state, Packed) for state in states):
            raise Unplaced(f"`{name}` takes several projections at once, which would each be split")
        if sizes is not None and len(states) == 1:
            return self._linear(node, name, sizes, states[0])
        sharded = [state for state in states if isinstance(state, Shards)]
        if not sharded:
            return None
        if len(states) != 1:
            raise Unplaced(f"`{name}` is called with a value that would be split over ranks beside others")
        return self._through(node, name, child, sharded[0])

    def _linear(self, node: fx.Node, name: str, sizes: tuple[int, int], state: State) -> State:
        in_features, out_features = sizes
        last = self._tensor(node).ndim - 1
        if name in self.column or name in self.row:
            raise Unplaced(f"`{name}` is called more than once")
        if state is None:
            self.column.add(name)
            if name in self.packed:
                return Packed(self.packed[name])
            if out_features % self.ranks:
                raise Unplaced(f"`{name}` gives {out_features} features, which {self.ranks} ranks do not divide")
            return Shards(last)
        if not isinstance(state, Shards) or state.axis != last:
            raise Unplaced(f"`{name}` takes a value that would be split along another axis than its features")
        if in_features % self.ranks:
            raise Unplaced(f"`{name}` takes {in_features} features, which {self.ranks} ranks do not divide")
        self.row.add(name)
        return None

    def _part_of_packed(self, node: fx.Node, packed: Packed, operands: int) -> State:
        """`chunk` and `split` give the parts, an index or a slice of columns takes one."""
        name, value = canonical(node), self.trace.value(node)
        if operands == 1 and name in {"chunk", "split"} and isinstance(value, tuple | list):
            widths = [part.shape[-1] if isinstance(part, torch.Tensor) else None for part in value]
            if widths == [end - start for start, end in packed.parts]:
                return packed
        if operands == 1 and name in {"getitem", "slice"} and isinstance(value, torch.Tensor):
            source = node.all_input_nodes[0]
            if not isinstance(self.trace.value(source), torch.Tensor):
                return Shards(value.ndim - 1)
            index = node.args[1]
            columns = index[-1] if isinstance(index, tuple) else None
            if isinstance(columns, slice) and columns.step in (None, 1):
                start, end, _ = (
                    columns.indices(self._tensor(source).shape[-1]) if _is_known(columns) else (None, None, 1)
                )
                if (start, end) in packed.parts:
                    return Shards(value.ndim - 1)
        if name in {"getattr", "shape"}:
            return None
        raise Unplaced(f"`{node.name}` ({name}) takes other parts of several projections than those that are split")

    def _through(self, node: fx.Node, name: str, child: nn.Module, state: Shards) -> Shards:
        """A child that treats the sharded axis entry by entry: an activation, or a norm over the last axis when another is split."""
        value = self._tensor(node)
        is_last = state.axis == value.ndim - 1
        if not any(True for _ in child.parameters()) and fx_match.activation(node, self.trace) is not None:
            return state
        if isinstance(child, nn.Dropout | nn.Identity):
            return state
        widths = {parameter.shape for parameter in child.parameters()}
        is_last_norm = widths <= {torch.Size([value.shape[-1]])} and self._is_norm(child)
        if is_last_norm and not is_last:
            return state
        if is_last_norm:
            raise Unplaced(f"`{name}` is a norm over all the features that would be split over ranks")
        raise Unplaced(f"`{name}` ({type(child).__name__}) takes a value that would be split over ranks")

    def _is_norm(self, child: nn.Module) -> bool:
        from tf_backend.plan.fusions import installed_fusions

        if type(child) is nn.LayerNorm:
            return True
        value = torch.empty((1, 2, 3, *next((p.shape for p in child.parameters()), (4,))), device="meta")
        traced = fx_match.trace(child, (value,))
        return any(
            fusion.name == "rms_norm" and isinstance(fusion.match(traced), fx_match.Match)
            for fusion in installed_fusions()
        )

    # ---- attention

    def _attention(self, node: fx.Node) -> Shards | None:
        query, key, value = (self.state[part] for part in node.args[1:4] if isinstance(part, fx.Node))
        others = [source for source in node.all_input_nodes if source not in node.args[1:4]]
        if any(self.state[source] is not None for source in others):
            raise Unplaced("an argument of attention beside query, key and value would be split over ranks")
        if query is None and key is None and value is None:
            return None
        if not (query == key == value == Shards(1)):
            raise Unplaced("query, key and value would not all be split by heads")
        if self.heads is None:
            raise Unplaced("its attention is not one that the engine takes")
        heads, kv_heads = self.heads
        if heads % self.ranks:
            raise Unplaced(f"{self.ranks} ranks do not divide its {heads} heads")
        if kv_heads % self.ranks and self.ranks % kv_heads:
            raise Unplaced(
                f"its {kv_heads} key-value heads can neither be split over {self.ranks} ranks nor repeated evenly"
            )
        self.attended = True
        return Shards(2)

    # ---- operations

    def _operation(self, node: fx.Node, sharded: dict[fx.Node, Shards]) -> Shards | None:
        name = canonical(node)
        value = self.trace.value(node)
        of = node.args[0] if name == "getitem" else None
        if isinstance(of, fx.Node) and of in sharded and not isinstance(self.trace.value(of), torch.Tensor):
            return self._part(node, sharded)
        if not isinstance(value, torch.Tensor):
            return self._size(node, name, value, sharded)
        if name in _ELEMENTWISE:
            return self._elementwise(node, value, sharded)
        if name in {"cat", "stack"}:
            return self._joined(node, name, sharded)
        if len(sharded) != 1:
            raise Unplaced(f"`{node.name}` ({name}) combines values that would be split over ranks")
        ((source, state),) = sharded.items()
        if name in {"reshape", "flatten", "unflatten", "unsqueeze", "squeeze"}:
            return self._reshape(node, source, state)
        if name in {"transpose", "permute"}:
            return self._permute(node, source, state)
        if name in {"getitem", "chunk", "split"}:
            return self._along_other_axes(node, name, source, state)
        raise Unplaced(f"`{node.name}` ({name}) takes a value that would be split over ranks")

    def _part(self, node: fx.Node, sharded: dict[fx.Node, Shards]) -> Shards | None:
        """An entry of a tuple: the attention output, or a size."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if source.target is attention_leaf:
            return sharded[source] if node.args[1] == 0 else None
        return sharded[source]

    def _size(self, node: fx.Node, name: str, value: object, sharded: dict[fx.Node, Shards]) -> Shards | None:
        """A size of a split value is smaller on a rank: allowed where only axes that are not split are read."""
        ((source, state),) = sharded.items()
        ndim = self._tensor(source).ndim
        axes: list[Any] = []
        if name == "dim":
            return None
        if name == "size" and isinstance(value, int):
            axes = [node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")]
        elif name in {"getattr", "shape", "size"} and isinstance(value, tuple):
            axes = [
                user.args[1] if canonical(user) == "getitem" and len(user.args) > 1 else None for user in node.users
            ]
        else:
            raise Unplaced(f"`{node.name}` ({name}) reads a value that would be split over ranks")
        if any(not isinstance(axis, int) or axis % ndim == state.axis for axis in axes):
            raise Unplaced(f"`{node.name}` reads the size of an axis that would be split over ranks")
        return None

    def _elementwise(self, node: fx.Node, value: torch.Tensor, sharded: dict[fx.Node, Shards]) -> Shards:
        """Operands broadcast against each other from the last axis: what is not split must have one entry along the split axis."""
        axes = {value.ndim - self._tensor(source).ndim + state.axis for source, state in sharded.items()}
        if len(axes) != 1:
            raise Unplaced(f"`{node.name}` combines values that would be split along different axes")
        (axis,) = axes
        for source in node.all_input_nodes:
            other = self.trace.value(source)
            if source in sharded or not isinstance(other, torch.Tensor):
                continue
            own = axis - (value.ndim - other.ndim)
            if own >= 0 and other.shape[own] != 1:
                raise Unplaced(
                    f"`{node.name}` combines a value that would be split with `{source.name}`, which is whole"
                )
        return Shards(axis)

    def _reshape(self, node: fx.Node, source: fx.Node, state: Shards) -> Shards:
        """The split axis keeps its place in memory: it is the first of the axes that it becomes part of, or becomes."""
        old, new = self._tensor(source).shape, self._tensor(node).shape
        before = _product(old[: state.axis])
        axis, seen = 0, 1
        while axis < len(new) and seen < before:
            seen *= new[axis]
            axis += 1
        while axis < len(new) and new[axis] == 1 and old[state.axis] != 1 and not self._repeats(1):
            axis += 1
        if seen != before or axis >= len(new) or (new[axis] % self.ranks and not self._repeats(new[axis])):
            raise Unplaced(f"`{node.name}` reshapes the axis that would be split in a way that does not keep its parts")
        smaller, larger = sorted((old[state.axis], new[axis]))
        if larger % smaller:
            raise Unplaced(f"`{node.name}` reshapes the axis that would be split in a way that does not keep its parts")
        self._require_free(node, new, axis)
        return Shards(axis)

    def _repeats(self, heads: int) -> bool:
        """Whether an axis of this length is that of key-value heads that ranks outnumber: each rank then holds a whole one."""
        return self.heads is not None and heads == self.heads[1] and self.ranks % heads == 0

    def _require_free(self, node: fx.Node, new: torch.Size, axis: int) -> None:
        """The forward must not spell the size of the split axis: it is another one on a rank."""
        sizes = node.args[1:]
        flat: list[Any] = [*sizes[0]] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else list(sizes)
        if canonical(node) == "reshape" and len(flat) == len(new) and flat[axis] != -1:
            raise Unplaced(f"`{node.name}` spells the size {new[axis]} of an axis that would be split over ranks")

    def _permute(self, node: fx.Node, source: fx.Node, state: Shards) -> Shards:
        ndim = self._tensor(source).ndim
        if canonical(node) == "transpose" and len(node.args) == 3:
            one, two = (int(axis) % ndim for axis in node.args[1:3])  # type: ignore[arg-type]
            return Shards({one: two, two: one}.get(state.axis, state.axis))
        order = node.args[1] if len(node.args) == 2 else node.args[1:]
        if not isinstance(order, tuple | list):
            raise Unplaced(f"`{node.name}` permutes axes in an order that is not known")
        return Shards([int(axis) % ndim for axis in order].index(state.axis))

    def _along_other_axes(self, node: fx.Node, name: str, source: fx.Node, state: Shards) -> Shards:
        """Slices and parts along axes that are not split; the split axis must come out as long as it went in."""
        old, new = self._tensor(source), self._tensor(node)
        if name != "getitem" or new.ndim != old.ndim or new.shape[state.axis] != old.shape[state.axis]:
            raise Unplaced(f"`{node.name}` ({name}) takes parts of a value that would be split over ranks")
        return state

    def _joined(self, node: fx.Node, name: str, sharded: dict[fx.Node, Shards]) -> Shards:
        """Values side by side along another axis; all of them split alike."""
        parts = node.args[0]
        axes = {state.axis for state in sharded.values()}
        if not isinstance(parts, tuple | list) or any(part not in sharded for part in parts) or len(axes) != 1:
            raise Unplaced(f"`{node.name}` ({name}) joins values that would be split with others")
        (axis,) = axes
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        if not isinstance(dim, int):
            raise Unplaced(f"`{node.name}` ({name}) joins along an axis that is not known")
        dim %= self._tensor(node).ndim
        if name == "stack":
            return Shards(axis + 1 if dim <= axis else axis)
        if dim == axis:
            raise Unplaced(f"`{node.name}` (cat) joins along the axis that would be split")
        return Shards(axis)

    def _tensor(self, node: fx.Node) -> torch.Tensor:
        value = self.trace.value(node)
        if isinstance(value, tuple) and value and isinstance(value[0], torch.Tensor):
            value = value[0]
        if not isinstance(value, torch.Tensor):
            raise Unplaced(f"the shape of `{node.name}` is not known")
        return value


def linear_sizes(child: object) -> tuple[int, int] | None:
    """(in, out) features of a linear that a layer of ours takes the place of; None for any other module."""
    if is_plain_linear(child) and isinstance(child, nn.Linear):
        return child.in_features, child.out_features
    if isinstance(child, nn.Module) and is_transposed_linear(child):
        in_features, out_features = child.get_parameter("weight").shape
        return in_features, out_features
    return None


def _is_known(columns: slice) -> bool:
    return all(isinstance(end, int | None) for end in (columns.start, columns.stop))


def _product(sizes: Any) -> int:
    total = 1
    for size in sizes:
        total *= int(size)
    return total
