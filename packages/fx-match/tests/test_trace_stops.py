"""Leaves that are not looked into, and where a trace stops: reason, span, and the nodes so far."""

import pytest
import torch
from fx_match import UNKNOWN, LeafCall, TraceInputError, canonical, trace
from torch import nn

X = torch.zeros(2, 3, 4)


# Leaves


def attention(module, query, *, scale: float, mask=None):
    raise AssertionError("never runs")


REGISTRY = {"eager": attention}


class Attends(nn.Module):
    def forward(self, x, **kwargs):
        interface = REGISTRY["eager"]
        output, weights = interface(self, x, scale=0.5, **kwargs)
        return output, weights


def test_a_leaf_function_is_one_node_with_all_its_arguments(nodes, text) -> None:
    module = Attends()
    traced = trace(module, (X,), {"mask": None}, leaves={attention: lambda m, q, **kwargs: (q.transpose(1, 2), None)})
    assert traced.complete, traced.stop
    (leaf,) = [node for node in traced.graph.nodes if node.target is attention]
    assert leaf.args == (module, nodes(traced, "placeholder")[0])
    assert leaf.kwargs == {"scale": 0.5, "mask": None}
    assert text(traced, leaf) == "interface(self, x, scale=0.5, **kwargs)"
    assert traced.output[0].args == (leaf, 0)
    assert traced.value(traced.output[0]).shape == (2, 4, 3)
    assert traced.output[1] is None


def test_a_leaf_without_meta_function_is_run_itself_and_closures_can_be_leaves(nodes) -> None:
    factor = 3

    def closure(x, power=2):
        return x**power * factor

    class M(nn.Module):
        def forward(self, x):
            return closure(x)

    traced = trace(M(), (X,), leaves=[LeafCall(closure)])
    assert [canonical(node) for node in traced.graph.nodes][0::2] == ["placeholder", "output"]
    assert nodes(traced, "call_function")[0].target is closure
    assert closure(torch.tensor(2.0)).item() == 12


def test_torch_functions_and_module_classes_can_be_leaves() -> None:
    class Router(nn.Module):
        def forward(self, x):
            return x.nonzero()

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = Router()

        def forward(self, x):
            return torch.nonzero(x), self.router(x)

    assert not trace(M(), (X,)).complete
    traced = trace(
        M(),
        (X,),
        leaves={torch.nonzero: lambda x: x.new_empty(5, 3), Router: lambda child, x: x.new_empty(6, 3)},
    )
    assert traced.complete, traced.stop
    assert [traced.value(node).shape[0] for node in traced.output] == [5, 6]


# Stops


def test_a_branch_on_data_stops_with_reason_span_and_the_nodes_so_far(nodes, text) -> None:
    class M(nn.Module):
        def forward(self, x):
            y = x * 2
            if y.sum() > 0:
                return y
            return -y

    traced = trace(M(), (X,))
    assert not traced.complete
    assert traced.output is None
    assert "needs the data of a tensor" in traced.stop.reason
    assert traced.stop.exception == "RuntimeError"
    assert text(traced, nodes(traced, "gt")[0]) == "y.sum() > 0"
    assert traced.stop.span == traced.span(nodes(traced, "gt")[0])
    assert canonical(list(traced.graph.nodes)[1]) == "mul"
    assert traced.value(list(traced.graph.nodes)[-1]) is UNKNOWN


@pytest.mark.parametrize("read", [lambda x: x.item(), lambda x: x.tolist(), lambda x: float(x), lambda x: x.nonzero()])
def test_reading_data_stops(read) -> None:
    class M(nn.Module):
        def forward(self, x):
            return x * 2, read(x.sum())

    traced = trace(M(), (X,))
    assert not traced.complete
    assert traced.stop.span is not None
    assert "data of a tensor" in traced.stop.reason


def _fails_deep(x):
    raise KeyError("no such mask")


def test_an_exception_stops_at_the_call_in_the_forward_and_names_the_line_that_raised() -> None:
    class M(nn.Module):
        def forward(self, x):
            y = x + 1
            return _fails_deep(y)

    traced = trace(M(), (X,))
    assert traced.stop.exception == "KeyError"
    assert "no such mask" in traced.stop.reason
    assert traced.stop.location.function == "_fails_deep"
    assert traced.stop.location.text == 'raise KeyError("no such mask")'
    assert traced.stop.span.lineno == traced.code.co_firstlineno + 2


# Misuse


def test_misuse_is_a_type_error(gated_mlp) -> None:
    with pytest.raises(TypeError, match=r"takes an nn\.Module, found function"):
        trace(lambda x: x)
    with pytest.raises(TraceInputError, match="no Python method named 'nothing'"):
        trace(gated_mlp, (X,), method="nothing")
    with pytest.raises(TraceInputError, match="missing a required argument: 'x'"):
        trace(gated_mlp)
    with pytest.raises(TraceInputError, match="unexpected keyword argument 'y'"):
        trace(gated_mlp, (X,), {"y": 1})
    with pytest.raises(TraceInputError, match="a leaf must be"):
        trace(gated_mlp, (X,), leaves={len: len})
