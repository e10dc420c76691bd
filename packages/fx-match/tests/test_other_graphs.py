"""The same patterns in graphs that other tracers made: torch.fx, torch.export, torch.compile."""

import pytest
import torch
import torch.nn.functional as F
from fx_match import (
    VIEWS,
    any_value,
    canonical,
    explain,
    find,
    linear,
    op,
    scalar,
    silu,
    square,
    times_rsqrt,
    transparent,
)
from torch import fx, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(4, 8), nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        y = self.weight * y.to(x.dtype)
        return self.down(F.silu(self.gate(y)) * self.up(y))


GATED = linear("down")(silu(linear("gate")(any_value("y"))) * linear("up")(any_value("y")))
HIDDEN = op("cast")(any_value("x")) | any_value("x")
NORM = times_rsqrt(HIDDEN, op("mean", dim=-1, keepdim=True)(square(HIDDEN)) + scalar("eps"))
X = torch.zeros(2, 3, 4)


def check(graph) -> None:
    gated = find(GATED, graph)
    assert gated, explain(GATED, graph)
    assert gated["y"] is not None
    norm = find(NORM, graph)
    assert norm, explain(NORM, graph)
    assert norm["eps"] == 1e-6


def test_symbolic_trace() -> None:
    module = fx.symbolic_trace(Block())
    check(module)
    check(module.graph)


def test_export_before_and_after_decomposition() -> None:
    program = torch.export.export(Block(), (X.bfloat16().float(),))
    check(program.graph_module)
    flat = torch.export.export(Block(), (torch.zeros(3, 4),)).run_decompositions()
    check(flat.graph_module)
    assert not find(GATED, program.run_decompositions().graph_module)
    y = transparent(any_value("y"), VIEWS)
    gate, up = (transparent(linear(name)(y), VIEWS) for name in ("gate", "up"))
    reshaped = linear("down")(transparent(silu(gate) * up, VIEWS))
    assert find(reshaped, program.run_decompositions().graph_module)
    assert any(node.target is torch.ops.aten.addmm.default for node in flat.graph.nodes)


def test_dynamo() -> None:
    graphs: list[fx.GraphModule] = []

    def backend(graph_module, inputs):
        graphs.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(Block(), backend=backend)(X)
    (graph_module,) = graphs
    check(graph_module)
    found = find(GATED, graph_module)
    assert __file__ in found.subject.location(found["down"]).file
    assert find(op("tanh"), graph_module).line != ""


@pytest.mark.parametrize("transposed", [True, False])
def test_a_product_is_a_linear_only_with_a_transposed_stored_weight(transposed) -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.get_attr("w")
    right = graph.call_function(torch.ops.aten.t.default, (w,)) if transposed else w
    node = graph.call_function(torch.ops.aten.mm.default, (x, right))
    graph.output(node)
    found = find(linear("l")(any_value("x")), graph)
    assert bool(found) is transposed
    if transposed:
        assert found["x"] is x
        assert {canonical(covered) for covered in found.nodes} == {"matmul", "transpose", "get_attr"}
