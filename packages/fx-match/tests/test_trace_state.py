"""A trace leaves nothing of its own behind, and its graph computes what the module computes, writes in place included."""

import cProfile
import functools
import operator
import sys
import threading

import pytest
import torch
from fx_match import LeafCall, canonical, trace
from torch import fx, nn

X = torch.zeros(2, 3, 4)


def attention(module, query, *, scale: float, mask=None):
    raise AssertionError("never runs")


# Nothing left behind


def test_hooks_are_gone_after_success_failure_and_nesting(gated_mlp, nodes) -> None:
    call = nn.Module.__call__

    class Inner(nn.Module):
        def forward(self, x):
            inner = trace(gated_mlp, (x,))
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


class _Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.is_first, self.same, self.held, self.table = True, 1, [1.0], {"a": 1}

    def forward(self, x):
        self.is_first = False
        self.same = 1
        self.held.append(2.0)
        self.table["a"] = 1
        self.child.kept = x
        return self.child(x)


def test_what_the_forward_changed_is_told_and_put_back() -> None:
    module = _Remembers()
    changes = trace(module, (torch.empty(2, 4),)).changes
    assert changes == {"is_first", "held", "child.kept"}
    assert (module.is_first, module.held) == (True, [1.0])
    assert not hasattr(module.child, "kept")


def _switched_off(module):
    module.is_on = False


class _ChangesLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.is_on, self.count, self.by_name, self.fixed, self.unread = True, 0, 1, 2, 3

    def counted(self):
        self.count += 1

    def forward(self, x):
        if self.fixed and not x.shape[0]:
            _switched_off(self)
            for name in ("by_name",):
                setattr(self, name, 2)
            self.unread = 4
        if self.count > 5:
            self.counted()
        return x * self.by_name if self.is_on else x


def _renaming(forward):
    @functools.wraps(forward)
    def run(self, *args, old=None, **kwargs):
        return forward(self, *args, new=old, **kwargs)

    return run


class _Takes(nn.Module):
    def forward(self, x, flag=False, *rest, other=None, scale=2.0, **options):
        flag = not flag
        return x * scale


class _Decorated(nn.Module):
    @_renaming
    def forward(self, x, new=1, other=None):
        return x


def test_parameters_without_tensors_are_told_as_the_forward_found_them() -> None:
    assert trace(_Takes(), (X,)).given == {"flag": False, "other": None, "scale": 2.0}
    assert trace(_Takes(), (X, True, 3), {"other": X, "more": 1}).given == {"flag": True, "scale": 2.0}
    assert trace(_Decorated(), (X,), {"old": 5}).given == {"new": 5, "other": None}
    assert sys.getprofile() is None


def _later() -> None:
    pass


def test_a_profiler_that_runs_goes_on_and_changes_nothing() -> None:
    alone = trace(_Takes(), (X,)).given
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        seen = trace(_Takes(), (X,)).given
        _later()
    finally:
        profiler.disable()
    assert seen == alone
    assert any(getattr(entry.code, "co_name", "") == "_later" for entry in profiler.getstats())


def test_a_function_that_profiles_is_given_back() -> None:
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(frame.f_code.co_name))
    try:
        trace(_Takes(), (X,))
        _later()
    finally:
        sys.setprofile(None)
    assert "_later" in calls


def test_what_another_path_would_change_is_told_too() -> None:
    assert trace(_ChangesLater(), (X,)).changes == {"is_on", "count", "by_name"}


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


def test_children_with_real_weights_are_not_computed_and_not_changed(nodes) -> None:
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


def test_another_thread_runs_modules_undisturbed_while_a_trace_runs(gated_mlp) -> None:
    entered, leave = threading.Event(), threading.Event()
    other = gated_mlp
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


# Dataflow


def test_a_graph_computes_what_the_module_computes(gated_mlp) -> None:
    class M(type(gated_mlp)):
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


def test_a_write_through_an_index_or_a_view_marks_the_value(nodes) -> None:
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


@pytest.mark.parametrize("view", ["data", "data.mT", "mT.data", "data.data"])
def test_a_write_through_data_marks_the_value(view: str) -> None:
    """What `data` gives counts its writes for itself; its storage is that of the tensor."""

    class M(nn.Module):
        def forward(self, x):
            y = x + 1
            operator.attrgetter(view)(x).mul_(2)
            return y + x

    traced = trace(M(), (X,))
    (placeholder,) = [node for node in traced.graph.nodes if node.op == "placeholder"]
    assert traced.complete
    assert [node.target for node in traced.written_by(placeholder)] == ["mul_"]


def test_what_torchscript_computes_is_in_the_graph() -> None:
    @torch.jit.script
    def scripted(x, y):
        return torch.sigmoid(x) * y

    class M(nn.Module):
        def forward(self, x):
            return scripted(x, x + 1) * 2

    traced = trace(M(), (X,))
    assert [canonical(node) for node in traced.graph.nodes] == ["placeholder", "add", "sigmoid", "mul", "mul", "output"]


def test_values_made_in_the_trace_from_constants_may_be_looked_into(nodes) -> None:
    class M(nn.Module):
        def forward(self, x):
            steps = torch.tensor([1, 2, 3])
            for step in steps.tolist():
                x = x * step
            return x + steps.sum()

    traced = trace(M(), (X,))
    assert traced.complete, traced.stop
    assert [node.args[1] for node in nodes(traced, "mul")] == [1, 2, 3]


def test_tensors_from_outside_are_constants(nodes) -> None:
    outside = torch.arange(4.0)

    class M(nn.Module):
        def forward(self, x):
            return x + outside

    traced = trace(M(), (X,))
    (node,) = nodes(traced, "get_attr")
    assert traced.constants[node.target] is outside


def test_the_same_call_can_be_traced_with_more_leaves(text) -> None:
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
