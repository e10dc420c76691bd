"""What the tests of `trace` share: a module, the nodes of a kind, the source text of a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fx_match import Trace, canonical
from torch import fx, nn


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 8)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.act = nn.SiLU()

    def forward(self, x: Any) -> Any:
        return self.down(self.act(self.gate(x)) * self.up(x))


@pytest.fixture
def gated_mlp() -> GatedMLP:
    """``down(act(gate(x)) * up(x))`` over 4 features."""
    return GatedMLP()


@pytest.fixture(scope="session")
def nodes() -> Callable[[Trace, str], list[fx.Node]]:
    """``nodes(trace, kind)``: those of an operation, by opcode or canonical name."""
    return lambda traced, kind: [node for node in traced.graph.nodes if kind in (node.op, canonical(node))]


@pytest.fixture(scope="session")
def text() -> Callable[[Trace, fx.Node], str]:
    """``text(trace, node)``: the expression that made a node; it must lie on one line."""

    def read(traced: Trace, node: fx.Node) -> str:
        span = traced.span(node)
        assert span is not None
        assert traced.code is not None
        with open(traced.code.co_filename) as file:
            lines = file.read().splitlines()
        assert span.lineno == span.end_lineno
        return lines[span.lineno - 1].encode()[span.col : span.end_col].decode()

    return read
