"""Sizes are plain numbers to the forward and nodes to the graph; what hangs on them is a guard."""

import copy
import math
import operator
import pickle

import pytest
import torch
from fx_match import canonical, trace
from torch import fx, nn

X = torch.zeros(2, 6, 4)


def traced_of(function, *args):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.scales = [1.0, 2.0, 3.0]

        def forward(self, x, *rest):
            return function(self, x, *rest)

    module = M()
    traced = trace(module, (X, *args))
    assert traced.complete, traced.stop
    return traced


def size_guards(traced) -> list[tuple[str, object, bool | None]]:
    return [(guard.expr, guard.value, guard.outcome) for guard in traced.guards if guard.kind == "size"]


def test_shape_reads_and_arithmetic_are_nodes_and_no_guards() -> None:
    def forward(self, x):
        batch, length, width = x.shape
        return x.reshape(batch * length, width // 2, -1), x.view(*x.shape[:-1], 2, x.size(-1) // 2)

    traced = traced_of(forward)
    assert size_guards(traced) == []
    flat, split = traced.output
    assert [canonical(node) for node in flat.args[1:3]] == ["mul", "floor_div"]
    assert flat.args[3] == -1
    assert [node.args[1] for node in split.args[1:3]] == [0, 1]
    assert traced.value(flat.args[1]) == 12


def test_the_graph_holds_for_other_sizes() -> None:
    def forward(self, x):
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1).view(x.shape) * (half + 0.5) / x.shape[1] ** 0.5

    traced = traced_of(forward)
    assert size_guards(traced) == []
    y = torch.randn(3, 5, 10)
    found = fx.Interpreter(traced.module, graph=traced.graph).run(y)
    assert torch.allclose(found, forward(None, y))


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (lambda x: x.shape[1] > 1, ("x.shape[1] > 1", 6, True)),
        (lambda x: x.shape[1] == x.shape[2], ("x.shape[1] == x.shape[2]", 6, False)),
        (lambda x: x.size(1) % 4 != 0, ("(x.size(1) % 4) != 0", 2, True)),
        (lambda x: operator.lt(3, x.shape[0]), ("x.shape[0] > 3", 2, False)),
        (lambda x: x.shape[1] - 6, ("(x.shape[1] - 6)", 0, False)),
        (lambda x: x.numel() >= 2 * x.shape[2], ("x.numel() >= (2 * x.shape[2])", 48, True)),
        (lambda x: x.shape[1] / 4 <= 1.5, ("(x.shape[1] / 4) <= 1.5", 1.5, True)),
    ],
)
def test_a_branch_on_a_size_is_a_guard(condition, expected) -> None:
    traced = traced_of(lambda self, x: x + 1 if condition(x) else x - 1)
    assert size_guards(traced) == [expected]


@pytest.mark.parametrize(
    "use",
    [
        lambda self, x: sum(x for _ in range(x.shape[1])),
        lambda self, x: x * math.sqrt(x.shape[1]),
        lambda self, x: x * int(x.shape[1]),
        lambda self, x: x * len([0] * x.shape[1]),
        lambda self, x: x * round(x.shape[1]),
        lambda self, x: x * (x.shape[1] & 1),
        lambda self, x: x * divmod(x.shape[1], 4)[0],
        lambda self, x: x.view(-1, 6, 4) * torch.zeros(6, 4)[: math.floor(x.shape[1])],
    ],
)
def test_a_size_that_becomes_a_plain_number_is_a_guard_without_outcome(use) -> None:
    assert ("x.shape[1]", 6, None) in size_guards(traced_of(use))


def test_loops_over_a_tensor_and_its_length_are_guards() -> None:
    def forward(self, x):
        for row in x:
            x = x + row
        return x * len(x)

    assert [expr for expr, _, _ in size_guards(traced_of(forward))] == ["len(x)", "len(add_1)"]


def test_the_shape_of_a_parameter_is_a_fact_about_the_module() -> None:
    def forward(self, x):
        return x * 2 if self.weight.shape[0] == 4 and self.weight.numel() > 3 else x

    traced = traced_of(forward)
    assert size_guards(traced) == []
    assert canonical(traced.output) == "mul"


def test_a_guard_is_noted_once_and_with_its_span() -> None:
    def forward(self, x):
        for _ in self.scales:
            x = x + 1 if X.shape[0] and x.shape[0] > 1 else x
        return x

    traced = traced_of(forward)
    assert [expr for expr, _, _ in size_guards(traced)] == ["x.shape[0] > 1", "add.shape[0] > 1", "add_1.shape[0] > 1"]
    assert all(guard.span is not None for guard in traced.guards)


def test_a_size_passes_for_an_int() -> None:
    def forward(self, x):
        size = x.shape[2]
        assert isinstance(size, int)
        assert {4: "four"}[size] == "four"
        assert f"{size}" == "4"
        assert f"{size:>3}" == "  4"
        assert type(copy.deepcopy(size)) is int
        assert pickle.loads(pickle.dumps(size)) == 4
        assert max(size, 2) == 4
        assert isinstance(range(size), range)
        return torch.zeros(size, size, dtype=x.dtype) @ torch.eye(size)

    assert traced_of(forward).complete


def test_after_the_trace_a_size_is_a_number_like_any_other() -> None:
    kept = []

    def forward(self, x):
        kept.append(x.shape[1])
        return x + 1

    traced = traced_of(forward)
    before = len(traced.graph.nodes)
    assert kept[0] * 2 == 12
    assert type(kept[0] * 2) is int
    assert kept[0] == 6
    assert len(traced.graph.nodes) == before
    assert size_guards(traced) == []


def test_a_size_from_one_trace_is_a_constant_in_another() -> None:
    kept = []
    traced_of(lambda self, x: kept.append(x.shape[1]) or x)
    second = traced_of(lambda self, x: x * kept[0])
    assert second.output.args[1] == 6
