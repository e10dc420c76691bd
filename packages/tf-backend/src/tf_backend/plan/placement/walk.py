"""One walk through the graph of a module: states of its values, styles of its linears.

In: a trace, the linears that are to be split less or not at all. Out: what was found, or `Blocked` with the reason and the linears that
led to it. Projections of a whole input are split on outputs; a linear that takes split features is split on inputs and sums over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import fx_match
import torch
from fx_match import Trace, canonical, is_inplace
from torch import fx, nn
from vllm_layers_bridge.fusions.children import is_transposed_linear
from vllm_layers_bridge.fusions.protocol import is_plain_linear
from vllm_layers_bridge.seams.leaf import attention_leaf

from tf_backend.plan.placement import operations, views
from tf_backend.plan.placement.packed import part_of_packed
from tf_backend.plan.placement.sizes import arithmetic, check_branches, part_of_shape, read_size
from tf_backend.plan.placement.states import (
    Found,
    LocalShape,
    LocalSize,
    Packed,
    Part,
    Scene,
    Shards,
    State,
    Styles,
    Unplaced,
    shards,
)

_SIZE_READS = frozenset({"shape", "size", "dim", "getattr"})
_TAKES_SIZES = frozenset({"reshape", "expand", "unflatten"})


class Blocked(Unplaced):
    """Why a walk came to its end, and which linears, split on their outputs, led there."""

    def __init__(self, reason: str, linears: frozenset[str] = frozenset()) -> None:
        super().__init__(reason)
        self.linears = linears


class Walk:
    """See the module.

    Args:
        heads: query heads and key-value heads of each call of attention, in order.
        merged: for each child that a merged layer takes, in whole or in parts, the columns of the parts.
        is_norm: whether a child becomes a root-mean-square norm of ours, which can take its mean over ranks.
        fewer: linears that are to be split on outputs into fewer pieces than there are ranks, or, in one piece, not at all.
        kept: linears that stay as they are written, whole.
    """

    def __init__(
        self,
        trace: Trace,
        ranks: int,
        heads: Sequence[tuple[int, int]],
        merged: Mapping[str, tuple[Part, ...]],
        is_norm: Callable[[str], bool],
        fewer: Mapping[str, int],
        kept: frozenset[str] = frozenset(),
    ) -> None:
        self.ranks = ranks
        self.heads = tuple(heads)
        self.merged = merged
        self.is_norm = is_norm
        self.fewer = fewer
        self.kept = kept
        self.found = Found()
        self.calls = 0
        self.scene = Scene(trace, ranks, self.found)

    def run(self) -> Styles:
        """Walk to the end.

        Raises:
            Blocked: the module cannot be split so.
        """
        self._through(self.scene)
        found = self.found
        if not found.row:
            raise Blocked("none of its linears takes what another one gives")
        if self.heads and found.attention_calls != len(self.heads):
            raise Blocked("its attention would not be split by heads")
        return Styles(
            frozenset(found.column),
            frozenset(found.row),
            frozenset(found.whole),
            found.pieces,
            found.norms,
            found.parameters,
            tuple(found.spelled),
            self.scene.states,
        )

    def _through(self, scene: Scene) -> None:
        """Set the state of each node of a graph but the output, whose parts must be whole; or, below the module, follow its operand."""
        for node in scene.trace.graph.nodes:
            try:
                if node.op == "output":
                    check_branches(scene)
                    if not scene.prefix:
                        self._finish(scene, node)
                elif node not in scene.states:
                    scene.states[node] = self._step(scene, node)
            except Unplaced as problem:
                raise Blocked(str(problem), self._leading_to(scene, node)) from problem

    def _finish(self, scene: Scene, output: fx.Node) -> None:
        for node in output.all_input_nodes:
            if scene.states.get(node) is not None:
                raise Unplaced(f"it returns `{node.name}`, which would be split over ranks")

    def _leading_to(self, scene: Scene, node: fx.Node) -> frozenset[str]:
        """The linears split on outputs from which a node is computed."""
        if scene.prefix:
            return frozenset()
        seen, stack, names = set[fx.Node](), [node], set[str]()
        while stack:
            current = stack.pop()
            if current in seen:
                continue
            seen.add(current)
            stack.extend(current.all_input_nodes)
            if current.op == "call_module" and str(current.target) in self.found.column:
                names.add(str(current.target))
        return frozenset(names)

    def _require_own(self, scene: Scene, node: fx.Node) -> None:
        """A weight that is read outside of its linear is whole, and so must the linear be: it stays as transformers wrote it."""
        owner = str(node.target).rpartition(".")[0]
        if any(other.op == "call_module" and other.target == owner for other in scene.trace.graph.nodes):
            child = scene.trace.module.get_submodule(owner)
            if linear_sizes(child) is not None:
                raise Unplaced(f"`{node.target}` is read beside calling `{owner}`, which would be split")

    def _step(self, scene: Scene, node: fx.Node) -> State:
        if node.op == "get_attr":
            self._require_own(scene, node)
        if node.op in {"placeholder", "get_attr"}:
            return None
        if node.op == "call_module":
            return self._module(scene, node)
        if node.target is attention_leaf:
            return self._attention(scene, node)
        states = [state for source in node.all_input_nodes if (state := scene.states[source]) is not None]
        name = canonical(node)
        if name in operations.FACTORIES:
            return views.factory(scene, node)
        if not states:
            return None
        first = node.args[0] if node.args else None
        state = scene.states.get(first) if isinstance(first, fx.Node) else None
        if any(isinstance(given, Packed) for given in states):
            packed = next(given for given in states if isinstance(given, Packed))
            return part_of_packed(scene, node, packed)
        if isinstance(first, fx.Node) and name == "getitem" and not isinstance(scene.trace.value(first), torch.Tensor):
            return self._entry(scene, node, first, state)
        if isinstance(first, fx.Node) and isinstance(state, Shards) and self._is_size_read(scene, node, name):
            return read_size(scene, node, first, state)
        if not isinstance(scene.trace.value(node), torch.Tensor) and all(isinstance(s, LocalSize) for s in states):
            if len(states) != 1:
                raise Unplaced(f"`{node.name}` ({name}) computes with sizes of axes that would be split over ranks")
            assert isinstance(states[0], LocalSize)
            return arithmetic(scene, node, states[0])
        if any(isinstance(given, LocalShape | LocalSize) for given in states) and name not in _TAKES_SIZES:
            raise Unplaced(f"`{node.name}` ({name}) reads the size of an axis that would be split over ranks")
        if name == "expand" and isinstance(first, fx.Node):
            return views.expand(scene, node, first)
        if not any(isinstance(given, Shards) for given in states):
            raise Unplaced(f"`{node.name}` ({name}) gives a whole value the size of one that would be split over ranks")
        return operations.operation(scene, node)

    def _is_size_read(self, scene: Scene, node: fx.Node, name: str) -> bool:
        is_number = not isinstance(scene.trace.value(node), torch.Tensor | tuple | list)
        return name in _SIZE_READS or (is_number and not is_inplace(node))

    def _entry(self, scene: Scene, node: fx.Node, source: fx.Node, state: State) -> State:
        """An entry of a tuple: the attention output, a part of a tensor, or a size."""
        if isinstance(state, LocalShape):
            return part_of_shape(scene, node, state)
        if source.target is attention_leaf:
            return state if node.args[1] == 0 else None
        if isinstance(scene.trace.value(node), torch.Tensor):
            return state
        raise Unplaced(f"`{node.name}` takes a part of values that would be split over ranks")

    # ---- child modules

    def _module(self, scene: Scene, node: fx.Node) -> State:
        name = str(node.target)
        child = scene.trace.module.get_submodule(name)
        states = [scene.states[source] for source in node.all_input_nodes]
        if any(isinstance(state, Packed) for state in states):
            raise Unplaced(f"`{name}` takes several projections at once, which would each be split")
        sizes = linear_sizes(child)
        if sizes is not None and len(states) == 1 and not scene.prefix and "." not in name:
            return self._linear(scene, node, name, sizes, states[0])
        if not any(state is not None for state in states):
            return None
        if any(isinstance(state, LocalShape | LocalSize) for state in states):
            raise Unplaced(f"`{name}` takes the size of an axis that would be split over ranks")
        return self._child(scene, node, name, child)

    def _linear(self, scene: Scene, node: fx.Node, name: str, sizes: tuple[int, int], state: State) -> State:
        in_features, out_features = sizes
        last = scene.tensor(node).ndim - 1
        found = self.found
        if name in found.column or name in found.row or name in found.whole:
            raise Unplaced(f"`{name}` is called more than once")
        if name in self.kept:
            if state is not None:
                raise Unplaced(f"`{name}` stays as it is written, and takes a value that would be split over ranks")
            found.whole.add(name)
            return None
        if state is None:
            return self._projection(name, out_features, last)
        if not isinstance(state, Shards) or name in self.merged:
            raise Unplaced(f"`{name}` takes a value that would be split along another axis than its features")
        if state.axis != last:
            found.whole.add(name)  # the same linear for each head, or whatever lies along the split axis
            return state
        if state.pieces != self.ranks:
            raise Unplaced(f"`{name}` would sum over ranks what several of them hold")
        if in_features % self.ranks:
            raise Unplaced(f"`{name}` takes {in_features} features, which {self.ranks} ranks do not divide")
        found.row.add(name)
        return None

    def _projection(self, name: str, out_features: int, last: int) -> State:
        pieces = self.fewer.get(name, self.ranks)
        if pieces == 1:
            self.found.whole.add(name)
            return None
        self.found.column.add(name)
        parts = self.merged.get(name)
        if parts is not None:
            is_one = len(parts) == 1 and (parts[0].start, parts[0].stop) == (0, out_features)
            return shards(last, parts[0].pieces) if is_one else Packed(parts)
        if out_features % pieces:
            raise Unplaced(f"`{name}` gives {out_features} features, which {pieces} ranks do not divide")
        self.found.pieces[name] = pieces
        return Shards(last, pieces)

    def _child(self, scene: Scene, node: fx.Node, name: str, child: nn.Module) -> State:
        """A child that takes split tensors: an activation, a norm, or whatever its own graph shows."""
        only = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        state = scene.shards(only)
        if state is not None:
            has_state = any(True for _ in child.parameters()) or any(True for _ in child.buffers())
            if isinstance(child, nn.Dropout | nn.Identity):
                return state
            if not has_state and fx_match.activation(node, scene.trace) is not None:
                return state
            if not scene.prefix and self.is_norm(name):
                return self._norm(scene, node, name, state)
        if any(linear_sizes(inner) is not None for inner in child.modules()):
            raise Unplaced(
                f"`{name}` ({type(child).__name__}) has linears of its own and takes a value that would be split"
            )
        return self._inside(scene, node, name, child)

    def _norm(self, scene: Scene, node: fx.Node, name: str, state: Shards) -> Shards:
        if (
            state.axis == scene.tensor(node).ndim - 1
            and self.found.norms.setdefault(name, state.pieces) != state.pieces
        ):
            raise Unplaced(f"`{name}` would be split in two ways")
        return state

    def _inside(self, scene: Scene, node: fx.Node, name: str, child: nn.Module) -> State:
        """Walk through the graph of a child, its inputs in the states that they have here."""
        given = [*node.args, *node.kwargs.values()]
        if any(not isinstance(value, fx.Node) and isinstance(value, tuple | list | dict) for value in given):
            raise Unplaced(
                f"`{name}` ({type(child).__name__}) takes a value that would be split over ranks among others"
            )
        args = tuple(self._value(scene, value) for value in node.args)
        kwargs = {key: self._value(scene, value) for key, value in node.kwargs.items()}
        inner = Scene(fx_match.trace(child, args, kwargs), self.ranks, self.found, f"{scene.prefix}{name}.")
        inputs = [inner_node for inner_node in inner.trace.graph.nodes if inner_node.op == "placeholder"]
        outside = [value for value in given if isinstance(value, fx.Node)]
        if not inner.trace.complete or len(inputs) != len(outside):
            raise Unplaced(
                f"`{name}` ({type(child).__name__}) takes a value that would be split, and could not be followed"
            )
        inner.states.update(zip(inputs, (scene.states[value] for value in outside), strict=True))
        try:
            self._through(inner)
        except Unplaced as problem:
            kind = (
                "a norm over all the features" if self._is_over_features(scene, node) else f"a {type(child).__name__}"
            )
            raise Unplaced(f"`{name}` is {kind} that would be split over ranks: {problem}") from problem
        output = inner.trace.output
        if not isinstance(output, fx.Node):
            raise Unplaced(f"`{name}` ({type(child).__name__}) takes a value that would be split and gives several")
        return inner.states[output]

    def _is_over_features(self, scene: Scene, node: fx.Node) -> bool:
        child = scene.trace.module.get_submodule(str(node.target))
        width = scene.tensor(node).shape[-1]
        return all(p.shape == (width,) for p in child.parameters()) and any(True for _ in child.parameters())

    def _value(self, scene: Scene, given: object) -> object:
        return scene.trace.value(given) if isinstance(given, fx.Node) else given

    # ---- attention

    def _attention(self, scene: Scene, node: fx.Node) -> State:
        query, key, value = (scene.states[part] for part in node.args[1:4] if isinstance(part, fx.Node))
        others = [source for source in node.all_input_nodes if source not in node.args[1:4]]
        if any(scene.states[source] is not None for source in others):
            raise Unplaced("an argument of attention beside query, key and value would be split over ranks")
        call, self.calls = self.calls, self.calls + 1
        if query is None and key is None and value is None:
            return None
        if call >= len(self.heads):
            raise Unplaced("its attention is not one that the engine takes")
        heads, kv_heads = self.heads[call]
        if heads % self.ranks:
            raise Unplaced(f"{self.ranks} ranks do not divide its {heads} heads")
        pieces = self.ranks if kv_heads % self.ranks == 0 else kv_heads
        if self.ranks % pieces:
            raise Unplaced(
                f"its {kv_heads} key-value heads can neither be split over {self.ranks} ranks nor repeated evenly"
            )
        if query != Shards(1, self.ranks) or not key == value == shards(1, pieces):
            raise Unplaced("query, key and value would not all be split by heads")
        self.found.attention_calls += 1
        return Shards(2, self.ranks)


def linear_sizes(child: object) -> tuple[int, int] | None:
    """(in, out) features of a linear that a layer of ours takes the place of; None for any other module."""
    if is_plain_linear(child) and isinstance(child, nn.Linear):
        return child.in_features, child.out_features
    if isinstance(child, nn.Module) and is_transposed_linear(child):
        in_features, out_features = child.get_parameter("weight").shape
        return in_features, out_features
    return None
