"""What a trace holds: nodes, values, spans, reads."""

import collections
import functools

import pytest
import torch
import torch.nn.functional as F
from fx_match import MISSING, SourceSpan, canonical, trace
from torch import nn

X = torch.zeros(2, 3, 4)


def test_nodes_values_and_spans_of_a_gated_mlp(gated_mlp, nodes, text) -> None:
    traced = trace(gated_mlp, (X,))
    assert traced.complete
    assert traced.stop is None
    assert [node.name for node in traced.graph.nodes] == ["x", "gate", "act", "up", "mul", "down", "output"]
    assert [text(traced, node) for node in list(traced.graph.nodes)[1:-1]] == [
        "self.gate(x)",
        "self.act(self.gate(x))",
        "self.up(x)",
        "self.act(self.gate(x)) * self.up(x)",
        "self.down(self.act(self.gate(x)) * self.up(x))",
    ]
    assert traced.value(nodes(traced, "mul")[0]).shape == (2, 3, 8)
    assert traced.value(nodes(traced, "mul")[0]).is_meta
    assert traced.output is nodes(traced, "module")[-1]
    assert traced.module_class is type(gated_mlp)
    assert traced.code is type(gated_mlp).forward.__code__


def test_a_multiline_and_non_ascii_expression_has_its_byte_columns(nodes, text) -> None:
    class M(nn.Module):
        def forward(self, x):
            é = x
            return torch.cat((é * 2, é),
                             dim=-1)  # fmt: skip

    traced = trace(M(), (X,))
    (mul,), (cat,) = nodes(traced, "mul"), nodes(traced, "cat")
    assert text(traced, mul) == "é * 2"
    span = traced.span(cat)
    assert span.end_lineno == span.lineno + 1
    assert traced.spans_hit(span) == [cat]


def test_a_loop_hits_one_span_several_times(nodes) -> None:
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    traced = trace(M(), (X,))
    calls = nodes(traced, "module")
    assert [node.target for node in calls] == ["layers.0", "layers.1", "layers.2"]
    assert traced.spans_hit(traced.span(calls[0])) == calls


def _rotate(x):
    return torch.cat((-x, x), dim=-1)


def test_a_node_made_in_a_helper_carries_both_spans(nodes, text) -> None:
    class M(nn.Module):
        def forward(self, x):
            return _rotate(x) + 1

    traced = trace(M(), (X,))
    (cat,) = nodes(traced, "cat")
    location = traced.location(cat)
    assert text(traced, cat) == "_rotate(x)"
    assert location.function == "_rotate"
    assert location.text == "return torch.cat((-x, x), dim=-1)"
    assert location.helper_span != location.span
    assert location.line == _rotate.__code__.co_firstlineno + 1


def test_parts_of_a_tuple_are_nodes_without_a_span_behind_the_whole(nodes) -> None:
    class M(nn.Module):
        def forward(self, x, pair):
            a, b = pair
            c, d = x.chunk(2, dim=-1)
            return (a * b, (c, d))

    traced = trace(M(), (X,), {"pair": (X, X)})
    assert [node.name for node in nodes(traced, "placeholder")] == ["x", "pair"]
    parts = nodes(traced, "getitem")
    assert [node.args for node in parts] == [
        (nodes(traced, "placeholder")[1], 0),
        (nodes(traced, "placeholder")[1], 1),
        (nodes(traced, "chunk")[0], 0),
        (nodes(traced, "chunk")[0], 1),
    ]
    assert all(traced.span(node) is None for node in parts)
    assert traced.spans_hit(traced.span(nodes(traced, "chunk")[0])) == nodes(traced, "chunk")
    assert traced.output == (nodes(traced, "mul")[0], (parts[2], parts[3]))


def test_a_tuple_passed_on_whole_stays_one_argument(nodes) -> None:
    class Child(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1]

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = Child()

        def forward(self, pair):
            return self.child(pair)

    traced = trace(M(), ((X, X),))
    assert nodes(traced, "module")[0].args == (nodes(traced, "placeholder")[0],)


def test_parameters_and_buffers_are_get_attr_nodes_with_the_span_of_their_read(nodes, text) -> None:
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("offset", torch.ones(4))

        def forward(self, x):
            return self.weight * x + self.offset

    module = M()
    traced = trace(module, (X,))
    weight, offset = nodes(traced, "get_attr")
    assert (weight.target, offset.target) == ("weight", "offset")
    assert traced.value(weight) is module.weight
    assert text(traced, weight) == "self.weight"


def test_results_that_are_their_own_input_are_nodes_of_their_own(nodes) -> None:
    class M(nn.Module):
        def forward(self, x):
            y = x.contiguous().float()
            return x * 2, y * 3

    traced = trace(M(), (X,))
    first, second = nodes(traced, "mul")
    assert first.args[0].op == "placeholder"
    assert canonical(second.args[0]) == "cast"
    assert canonical(second.args[0].args[0]) == "contiguous"


def test_tensors_pass_for_tensors() -> None:
    class M(nn.Module):
        def forward(self, x):
            assert isinstance(x, torch.Tensor)
            assert x.dtype is torch.float32
            assert x.ndim == x.dim() == 3
            assert x.device.type == "cpu"
            assert not x.is_cuda
            return x.to(x.device, torch.float64) + torch.zeros(4, device=x.device)

    traced = trace(M(), (X,))
    assert traced.complete, traced.stop
    read = {guard.expr for guard in traced.guards if guard.kind == "value"}
    assert read == {"x.dtype", "x.ndim", "x.dim()", "x.device", "x.is_cuda"}


def test_concrete_arguments_are_passed_through_and_defaults_apply(nodes) -> None:
    class M(nn.Module):
        def forward(self, x, *rest, factor=3.0, cache=None, flag, **kwargs):
            for other in rest:
                x = x + other
            cache.append(x)
            return x * factor if flag else kwargs["extra"]

    cache: list[torch.Tensor] = []
    traced = trace(M(), (X, X, X), {"cache": cache, "flag": True, "extra": X})
    assert [node.name for node in nodes(traced, "placeholder")] == ["x", "args_0", "args_1", "extra"]
    assert nodes(traced, "mul")[0].args[1] == 3.0
    assert len(cache) == 1


def test_dataclasses_mappings_and_namedtuples_are_returned_with_nodes(nodes) -> None:
    Pair = collections.namedtuple("Pair", "left right")

    class M(nn.Module):
        def forward(self, x):
            return {"pair": Pair(x + 1, 7), "max": x.max(dim=-1), "size": x.shape[0]}

    traced = trace(M(), (X,))
    add = nodes(traced, "add")[0]
    assert traced.output["pair"] == Pair(add, 7)
    assert [node.args[1] for node in traced.output["max"]] == [0, 1]
    assert traced.output["size"].args[1] == 0
    traced.graph.lint()


# Decorators


def _bare(function):
    def wrapper(self, *args):
        return function(self, *args)

    return wrapper


def _wrapped(function):
    @functools.wraps(function)
    def wrapper(self, *args):
        return function(self, *args)

    return wrapper


@pytest.mark.parametrize("decorator", [_bare, _wrapped, torch.no_grad(), lambda f: _bare(_wrapped(torch.no_grad()(f)))])
def test_the_span_is_in_the_forward_below_its_decorators(decorator, nodes, text) -> None:
    class M(nn.Module):
        @decorator
        def forward(self, x):
            return x * 2

    traced = trace(M(), (X,))
    assert traced.code.co_name == "forward"
    assert text(traced, nodes(traced, "mul")[0]) == "x * 2"


def test_super_and_other_methods(gated_mlp, nodes, text) -> None:
    class M(type(gated_mlp)):
        def forward(self, x):
            return super().forward(x) + 1

        def double(self, x):
            return 2 * self(x)

    traced = trace(M(), (X,))
    assert text(traced, nodes(traced, "mul")[0]) == "super().forward(x)"
    assert text(traced, nodes(traced, "add")[0]) == "super().forward(x) + 1"
    doubled = trace(M(), (X,), method="double")
    assert doubled.complete
    assert text(doubled, nodes(doubled, "mul")[-1]) == "2 * self(x)"


def test_a_forward_bound_on_the_instance_is_the_one_traced(gated_mlp) -> None:
    module = gated_mlp
    module.forward = lambda x: x + 5
    assert [canonical(node) for node in trace(module, (X,)).graph.nodes] == ["placeholder", "add", "output"]


# Reads


class Reader(nn.Module):
    scale = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.child.factor = 2
        self.flag = True
        self.function = F.silu
        self.register_parameter("bias", None)

    def helper(self, x):
        return x * self.scale

    def forward(self, x):
        if self.flag and not self.training and not hasattr(self, "absent"):
            x = self.helper(self.function(self.child(x)))
        return x if self.bias is None else x + self.bias * self.child.factor


def test_reads_are_plain_attributes_with_their_values() -> None:
    traced = trace(Reader().eval(), (X,))
    assert dict(traced.reads) == {
        "flag": True,
        "training": False,
        "absent": MISSING,
        "function": F.silu,
        "scale": 0.5,
        "bias": None,
    }
    assert all(guard.kind == "attribute" for guard in traced.guards)
    assert traced.guards[0].expr == "self.flag"
    assert isinstance(traced.guards[0].span, SourceSpan)


def test_reads_of_a_childs_attribute_have_its_path() -> None:
    module = Reader()
    module.bias = nn.Parameter(torch.ones(4))
    assert trace(module, (X,)).reads["child.factor"] == 2
