"""What a trace holds: nodes, values, spans, reads, stops; and that it leaves no trace of its own behind."""

import collections
import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from fx_match import MISSING, UNKNOWN, LeafCall, SourceSpan, TraceInputError, canonical, trace
from torch import fx, nn


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 8)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


X = torch.zeros(2, 3, 4)


def nodes(traced, kind):
    return [node for node in traced.graph.nodes if kind in (node.op, canonical(node))]


def text(traced, node) -> str:
    span = traced.span(node)
    with open(traced.code.co_filename) as file:
        lines = file.read().splitlines()
    assert span.lineno == span.end_lineno
    return lines[span.lineno - 1].encode()[span.col : span.end_col].decode()


def test_nodes_values_and_spans_of_a_gated_mlp() -> None:
    traced = trace(GatedMLP(), (X,))
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
    assert traced.module_class is GatedMLP
    assert traced.code is GatedMLP.forward.__code__


def test_a_multiline_and_non_ascii_expression_has_its_byte_columns() -> None:
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


def test_a_loop_hits_one_span_several_times() -> None:
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


def test_a_node_made_in_a_helper_carries_both_spans() -> None:
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


def test_parts_of_a_tuple_are_nodes_without_a_span_behind_the_whole() -> None:
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


def test_a_tuple_passed_on_whole_stays_one_argument() -> None:
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


def test_parameters_and_buffers_are_get_attr_nodes_with_the_span_of_their_read() -> None:
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


def test_results_that_are_their_own_input_are_nodes_of_their_own() -> None:
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


def test_concrete_arguments_are_passed_through_and_defaults_apply() -> None:
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


def test_dataclasses_mappings_and_namedtuples_are_returned_with_nodes() -> None:
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
def test_the_span_is_in_the_forward_below_its_decorators(decorator) -> None:
    class M(nn.Module):
        @decorator
        def forward(self, x):
            return x * 2

    traced = trace(M(), (X,))
    assert traced.code.co_name == "forward"
    assert text(traced, nodes(traced, "mul")[0]) == "x * 2"


def test_super_and_other_methods() -> None:
    class M(GatedMLP):
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


def test_a_forward_bound_on_the_instance_is_the_one_traced() -> None:
    module = GatedMLP()
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


# Leaves


def attention(module, query, *, scale: float, mask=None):
    raise AssertionError("never runs")


REGISTRY = {"eager": attention}


class Attends(nn.Module):
    def forward(self, x, **kwargs):
        interface = REGISTRY["eager"]
        output, weights = interface(self, x, scale=0.5, **kwargs)
        return output, weights


def test_a_leaf_function_is_one_node_with_all_its_arguments() -> None:
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


def test_a_leaf_without_meta_function_is_run_itself_and_closures_can_be_leaves() -> None:
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


def test_a_branch_on_data_stops_with_reason_span_and_the_nodes_so_far() -> None:
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


# Nothing left behind


def test_hooks_are_gone_after_success_failure_and_nesting() -> None:
    call = nn.Module.__call__

    class Inner(nn.Module):
        def forward(self, x):
            inner = trace(GatedMLP(), (x,))
            assert inner.complete
            return x * len(inner.graph.nodes)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            self.inner(x)
            raise ValueError

    code = attention.__code__
    traced = trace(Outer(), (X,), leaves={attention: attention})
    assert traced.stop.exception == "ValueError"
    assert nodes(traced, "module")[0].target == "inner"
    assert nn.Module.__call__ is call
    assert "__getattribute__" not in vars(nn.Module)
    assert attention.__code__ is code
    assert "range" not in globals()


def test_the_modules_state_is_put_back_and_its_data_untouched() -> None:
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("count", torch.zeros(()))
            self.seen = None

        def forward(self, x):
            self.seen = x
            self.extra = 1
            self.count += 1
            self.register_buffer("late", x)
            del self.norm.running_mean
            return self.norm(x) if False else x * self.count

    module = M()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    traced = trace(module, (X,))
    assert traced.complete, traced.stop
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert module.seen is None
    assert not hasattr(module, "extra")


def test_children_with_real_weights_are_not_computed_and_not_changed() -> None:
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(x)

    module = M().train()
    traced = trace(module, (X + 1,))
    assert traced.value(nodes(traced, "module")[0]).is_meta
    assert module.norm.num_batches_tracked == 0
    assert torch.equal(module.norm.running_mean, torch.zeros(3))


def test_another_thread_runs_modules_undisturbed_while_a_trace_runs() -> None:
    entered, leave = threading.Event(), threading.Event()
    other = GatedMLP()
    expected = other(torch.ones(1, 4))

    class Waits(nn.Module):
        def forward(self, x):
            entered.set()
            assert leave.wait(10)
            return x + 1

    traces = []
    thread = threading.Thread(target=lambda: traces.append(trace(Waits(), (X,), leaves={attention: attention})))
    thread.start()
    assert entered.wait(10)
    assert torch.equal(other(torch.ones(1, 4)), expected)
    with pytest.raises(AssertionError, match="never runs"):
        attention(None, None, scale=1.0)
    leave.set()
    thread.join()
    assert [canonical(node) for node in traces[0].graph.nodes] == ["placeholder", "add", "output"]


# Misuse


def test_misuse_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"takes an nn\.Module, found function"):
        trace(lambda x: x)
    with pytest.raises(TraceInputError, match="no Python method named 'nothing'"):
        trace(GatedMLP(), (X,), method="nothing")
    with pytest.raises(TraceInputError, match="missing a required argument: 'x'"):
        trace(GatedMLP())
    with pytest.raises(TraceInputError, match="unexpected keyword argument 'y'"):
        trace(GatedMLP(), (X,), {"y": 1})
    with pytest.raises(TraceInputError, match="a leaf must be"):
        trace(GatedMLP(), (X,), leaves={len: len})


# Dataflow


def test_a_graph_computes_what_the_module_computes() -> None:
    class M(GatedMLP):
        def forward(self, x):
            batch, length, _ = x.shape
            y = super().forward(x).view(batch * length, -1)
            y = (y + 1) / (2 - y) ** 2
            y += 3
            first, second = y.unflatten(0, (batch, length)).chunk(2, dim=-1)
            return 1 / torch.softmax(first, dim=-1), second.mean(-1, keepdim=True)

    module = M()
    traced = trace(module, (X,))
    assert traced.complete, traced.stop
    for shape in ((2, 3, 4), (5, 7, 4)):
        x = torch.randn(shape)
        found = fx.Interpreter(module, graph=traced.graph).run(x)
        for left, right in zip(found, module(x), strict=True):
            assert torch.equal(left, right)


def test_a_write_in_place_is_the_value_from_then_on() -> None:
    class M(nn.Module):
        def forward(self, x):
            y = x.clone()
            y += 1
            y.mul_(2)
            return y

    traced = trace(M(), (X,))
    add, mul = [node for node in traced.graph.nodes if node.target in ("add_", "mul_")]
    assert mul.args[0] is add
    assert traced.output is mul


def test_a_write_through_an_index_or_a_view_marks_the_value() -> None:
    class M(nn.Module):
        def forward(self, x):
            y, z, w = x.clone(), x.clone(), x.clone()
            y[0] = 1
            z.view(-1).add_(1)
            return y * 2, z * 2, w * 2

    traced = trace(M(), (X,))
    y, z, w = nodes(traced, "clone")
    assert [node.target for node in traced.written_by(z)] == ["add_"]
    assert [canonical(node) for node in traced.written_by(y)] == ["setitem"]
    assert traced.written_by(w) == ()


def test_what_torchscript_computes_is_in_the_graph() -> None:
    @torch.jit.script
    def scripted(x, y):
        return torch.sigmoid(x) * y

    class M(nn.Module):
        def forward(self, x):
            return scripted(x, x + 1) * 2

    traced = trace(M(), (X,))
    assert [canonical(node) for node in traced.graph.nodes] == ["placeholder", "add", "sigmoid", "mul", "mul", "output"]


def test_values_made_in_the_trace_from_constants_may_be_looked_into() -> None:
    class M(nn.Module):
        def forward(self, x):
            steps = torch.tensor([1, 2, 3])
            for step in steps.tolist():
                x = x * step
            return x + steps.sum()

    traced = trace(M(), (X,))
    assert traced.complete, traced.stop
    assert [node.args[1] for node in nodes(traced, "mul")] == [1, 2, 3]


def test_tensors_from_outside_are_constants() -> None:
    outside = torch.arange(4.0)

    class M(nn.Module):
        def forward(self, x):
            return x + outside

    traced = trace(M(), (X,))
    (node,) = nodes(traced, "get_attr")
    assert traced.constants[node.target] is outside


def test_the_same_call_can_be_traced_with_more_leaves() -> None:
    def double(x):
        return x + x

    def halve(x):
        return x * 0.5

    class M(nn.Module):
        def forward(self, x):
            return halve(double(x))

    first = trace(M(), (X,), leaves=[LeafCall(double)])
    again = first.with_leaves([LeafCall(halve)])
    assert [node.target for node in first.graph.nodes if node.target in (double, halve)] == [double]
    assert [node.target for node in again.graph.nodes if node.target in (double, halve)] == [double, halve]
    assert again.module is first.module
    assert [text(again, node) for node in again.graph.nodes if node.target is halve] == ["halve(double(x))"]
