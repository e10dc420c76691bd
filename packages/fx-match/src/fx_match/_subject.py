"""What a pattern is looked for in: a trace, or any fx graph, with what can be known of its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import fx, nn

from fx_match._canonical import node_value
from fx_match._facts import UNKNOWN
from fx_match._source import Location
from fx_match._tracing import Trace

SubjectLike: TypeAlias = "Trace | fx.Graph | fx.GraphModule | Subject"


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A graph, the module that its `get_attr` and `call_module` targets belong to, and the trace if there is one."""

    graph: fx.Graph
    module: nn.Module | None
    trace: Trace | None
    order: Mapping[fx.Node, int] = field(repr=False)

    @classmethod
    def of(cls, subject: SubjectLike) -> Subject:
        if isinstance(subject, Subject):
            return subject
        if isinstance(subject, Trace):
            return cls(subject.graph, subject.module, subject, _order(subject.graph))
        graph = subject.graph if isinstance(subject, fx.GraphModule) else subject
        if not isinstance(graph, fx.Graph):
            raise TypeError(f"patterns match in a Trace, fx.Graph or fx.GraphModule, found {type(subject).__name__}")
        owner = subject if isinstance(subject, fx.GraphModule) else graph.owning_module
        return cls(graph, owner, None, _order(graph))

    @property
    def complete(self) -> bool:
        return self.trace is None or self.trace.complete

    def value(self, node: fx.Node) -> object:
        """The node's value as the tracer left it, or UNKNOWN."""
        if self.trace is not None:
            return self.trace.value(node)
        value = node_value(node)
        return UNKNOWN if value is None else value

    def child(self, node: fx.Node) -> nn.Module | None:
        """The child module that a `call_module` node calls."""
        if self.module is None or node.op != "call_module":
            return None
        try:
            return self.module.get_submodule(str(node.target))
        except AttributeError:
            return None

    def tensor(self, node: fx.Node) -> torch.Tensor | None:
        """The parameter, buffer or constant that a `get_attr` node reads."""
        if node.op != "get_attr":
            return None
        if self.trace is not None and str(node.target) in self.trace.constants:
            return self.trace.constants[str(node.target)]
        found: object = self.module
        for part in str(node.target).split("."):
            found = getattr(found, part, None)
        return found if isinstance(found, torch.Tensor) else None

    def written_by(self, node: fx.Node) -> tuple[fx.Node, ...]:
        return self.trace.written_by(node) if self.trace is not None else ()

    def location(self, node: fx.Node) -> Location:
        """Where the node was made; from the recorded stack of other tracers, file and line only."""
        if self.trace is not None:
            return self.trace.location(node)
        return _from_stack_trace(node.stack_trace)


def _order(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: index for index, node in enumerate(graph.nodes)}


def _from_stack_trace(text: str | None) -> Location:
    for line in reversed((text or "").splitlines()):
        parts = line.strip().split(", ")
        if line.strip().startswith('File "') and len(parts) >= 3 and parts[1].startswith("line "):
            return Location(None, parts[0][6:-1], int(parts[1][5:]), parts[2].removeprefix("in "), None)
    return Location(None, None, None, None, None)
