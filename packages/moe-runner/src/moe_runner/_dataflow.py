"""Reading a trace: what a node depends on, what depends on it, what it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from fx_match import UNKNOWN, Trace
from torch import fx, nn

from moe_runner._block import Score


class Dataflow:
    """The dependencies of one trace, writes in place included: who writes into a tensor counts among what it depends on."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._inputs: dict[fx.Node, list[fx.Node]] = {}
        self._users: dict[fx.Node, list[fx.Node]] = {}
        for node in trace.graph.nodes:
            self._inputs[node] = [*node.all_input_nodes, *trace.written_by(node)]
            for source in self._inputs[node]:
                self._users.setdefault(source, []).append(node)

    def before(self, *nodes: fx.Node) -> set[fx.Node]:
        """`nodes` and all that they depend on."""
        return _reach(nodes, lambda node: self._inputs.get(node, ()))

    def after(self, *nodes: fx.Node) -> set[fx.Node]:
        """`nodes` and all that depends on them."""
        return _reach(nodes, lambda node: self._users.get(node, ()))

    def returns(self, node: fx.Node) -> bool | None:
        """Whether what the forward returns depends on `node`; None if the trace did not come that far."""
        return any(user.op == "output" for user in self.after(node)) if self.trace.complete else None

    def tensor(self, node: object) -> torch.Tensor | None:
        value = self.trace.value(node) if isinstance(node, fx.Node) else None
        return value if isinstance(value, torch.Tensor) else None

    def last_size(self, node: fx.Node) -> int | None:
        tensor = self.tensor(node)
        return tensor.shape[-1] if tensor is not None and tensor.dim() else None

    def child(self, node: fx.Node) -> nn.Module:
        return self.trace.module.get_submodule(str(node.target))

    def call_values(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """What a child was called with, on meta; None if a part of it is not known."""
        unknown = [source for source in node.all_input_nodes if self.trace.value(source) is UNKNOWN]
        if unknown:
            return None

        def value(item: Any) -> Any:
            return self.trace.value(item) if isinstance(item, fx.Node) else item

        args: Any = fx.node.map_aggregate(node.args, value)
        kwargs: Any = fx.node.map_aggregate(node.kwargs, value)
        return tuple(args), dict(kwargs)

    def scores(self, nodes: Iterable[fx.Node], sizes: set[int]) -> Iterator[Score]:
        """The score functions among `nodes` whose result has one of `sizes` for its last dimension, in graph order."""
        wanted = set(nodes)
        for node in self.trace.graph.nodes:
            kind = self._score(node) if node in wanted else None
            if kind is not None and self.last_size(node) in sizes:
                yield kind

    def _score(self, node: fx.Node) -> Score | None:
        name = operation(node)
        if node.op == "call_module":
            child = self.child(node)
            name = "softmax" if isinstance(child, nn.Softmax) else "sigmoid" if isinstance(child, nn.Sigmoid) else ""
        return "softmax" if name in ("softmax", "_softmax") else "sigmoid" if name in ("sigmoid", "sigmoid_") else None


def operation(node: fx.Node) -> str:
    """The plain name of the torch operation of a node; "" for others."""
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""


def _reach(nodes: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending.extend(step(node))
    return seen
