"""One name per operation, arguments by name, and activations by what they compute."""

import operator

import pytest
import torch
import torch.nn.functional as F
from fx_match import (
    ACTIVATIONS,
    NoSuchArgument,
    activation,
    argument,
    arguments,
    canonical,
    cast_dtype,
    function_activation,
    is_inplace,
    module_activation,
    trace,
)
from torch import fx, nn

X = torch.zeros(2, 3, 4)


def node_of(function, *args) -> fx.Node:
    """The last operation of a function of one tensor, traced."""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.function = function

        def forward(self, x):
            return self.function(x)

    traced = trace(M(), (args[0] if args else X,))
    assert traced.complete, traced.stop
    made = [node for node in traced.graph.nodes if node.op.startswith("call_")]
    return next(node for node in reversed(made) if traced.span(node) is not None)


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("mul", [lambda x: x * x, lambda x: 2 * x, lambda x: torch.mul(x, 2), lambda x: x.mul(2), lambda x: x.multiply(2)]),
        ("add", [lambda x: x + 1, lambda x: 1 + x, lambda x: torch.add(x, x), lambda x: torch.add(x, x, alpha=1)]),
        ("add_scaled", [lambda x: torch.add(x, x, alpha=2), lambda x: x.add(x, alpha=3)]),
        ("sub", [lambda x: x - 1, lambda x: 1 - x, lambda x: torch.sub(x, 1), lambda x: torch.rsub(x, 1)]),
        ("div", [lambda x: x / 2, lambda x: 1 / x, lambda x: torch.true_divide(x, 2), lambda x: x.div(2)]),
        ("floor_div", [lambda x: x // 2, lambda x: x.div(2, rounding_mode="floor"), lambda x: torch.floor_divide(x, 2)]),
        ("trunc_div", [lambda x: torch.div(x, 2, rounding_mode="trunc")]),
        ("pow", [lambda x: x**2, lambda x: torch.pow(x, 2), lambda x: 2**x]),
        ("neg", [lambda x: -x, torch.neg, torch.negative]),
        ("matmul", [lambda x: x @ x.mT, lambda x: torch.matmul(x, x.mT), lambda x: torch.bmm(x, x.mT)]),
        ("rsqrt", [torch.rsqrt, lambda x: x.rsqrt()]),
        ("cast", [lambda x: x.double(), lambda x: x.to(torch.half), lambda x: x.type_as(x.half()), lambda x: x.to(x.half())]),
        ("view_dtype", [lambda x: x.view(torch.int32), lambda x: x.view(dtype=torch.int32)]),
        ("to", [lambda x: x.to(x.device), lambda x: x.to(device=x.device)]),
        ("reshape", [lambda x: x.view(-1), lambda x: x.reshape(6, 4), lambda x: x.view_as(x), lambda x: torch.reshape(x, (-1,))]),
        ("transpose", [lambda x: x.transpose(1, 2), lambda x: x.mT, lambda x: x.swapaxes(0, 1), lambda x: x[0].t()]),
        ("split", [lambda x: x.split(2, dim=-1), lambda x: torch.split(x, [1, 3], -1), lambda x: x.split_with_sizes([4], -1)]),
        ("silu", [F.silu, torch._C._nn.silu, torch.ops.aten.silu.default, torch.ops.aten.silu]),
        ("mean", [lambda x: x.mean(-1), lambda x: torch.mean(x, dim=-1), lambda x: torch.ops.aten.mean.dim(x, [-1])]),
        ("clamp", [lambda x: x.clamp(0, 1), lambda x: torch.clip(x, 0), lambda x: x.clamp(max=1)]),
        ("cat", [lambda x: torch.cat([x, x]), lambda x: torch.concat((x, x), dim=1)]),
        ("getitem", [lambda x: x[0], lambda x: x[..., 1:]]),
        ("softmax", [lambda x: x.softmax(-1), lambda x: F.softmax(x, dim=-1), lambda x: torch.softmax(x, -1)]),
    ],
)  # fmt: skip
def test_spellings_of_one_operation(name, spellings) -> None:
    assert [canonical(node_of(spelling)) for spelling in spellings] == [name] * len(spellings)
    assert not any(is_inplace(node_of(spelling)) for spelling in spellings)


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        ("add", lambda x: x.add_(1)),
        ("mul", lambda x: operator.imul(x, 2)),
        ("silu", lambda x: F.silu(x, inplace=True)),
        ("relu", torch.relu_),
        ("mul", lambda x: torch.mul(x, 2, out=x)),
    ],
)
def test_operations_in_place_keep_the_name_and_are_marked(name, spelling) -> None:
    node = node_of(spelling)
    assert canonical(node) == name
    assert is_inplace(node)


def test_an_item_assignment_is_a_write() -> None:
    def write(x):
        x[0] = 1
        return x

    node = node_of(write)
    assert canonical(node) == "setitem"
    assert is_inplace(node)


def mul(x, y):
    raise NotImplementedError


def test_a_users_own_function_never_has_a_short_name() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(mul, (x, x))
    assert canonical(node) == f"{__name__}.mul"
    assert not is_inplace(node)
    assert arguments(node) == {"x": x, "y": x}


def test_a_softmax_that_casts_has_a_name_of_its_own() -> None:
    node = node_of(lambda x: torch.ops.aten._softmax.default(x, -1, True), X.half())
    assert canonical(node) == "softmax_to_float"
    assert canonical(node_of(lambda x: torch.ops.aten._softmax.default(x, -1, False))) == "softmax"


def test_other_kinds_of_node() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert canonical(x) == "placeholder"
    assert canonical(graph.call_module("child", (x,))) == "module"
    assert canonical(graph.output(x)) == "output"
    assert arguments(x) is None
    assert not is_inplace(x)


@pytest.mark.parametrize(
    "spelling",
    [
        lambda x: x.mean(-1, keepdim=True),
        lambda x: x.mean(dim=-1, keepdim=True),
        lambda x: torch.mean(x, -1, True),
        lambda x: torch.mean(input=x, dim=-1, keepdim=True),
        lambda x: torch.ops.aten.mean.dim(x, -1, True),
    ],
)
def test_arguments_by_name(spelling) -> None:
    node = node_of(spelling)
    assert argument(node, "keepdim") is True
    assert argument(node, "dim") in (-1, [-1])
    assert argument(node, "dtype") is None
    assert argument(node, "input").op == "placeholder"
    with pytest.raises(NoSuchArgument, match=r"mean.*has no argument named 'eps'"):
        argument(node, "eps")


def test_arguments_of_functions_in_python_and_spread_sizes() -> None:
    assert argument(node_of(lambda x: F.softmax(x, dim=-1, dtype=torch.float32)), "dtype") is torch.float32
    assert argument(node_of(lambda x: F.rms_norm(x, (4,), eps=1e-5)), "eps") == 1e-5
    assert argument(node_of(lambda x: x.view(2, -1)), "size") == (2, -1)
    assert argument(node_of(lambda x: x.reshape((2, -1))), "size") == (2, -1)
    assert argument(node_of(lambda x: x.permute(0, 2, 1)), "dim") == (0, 2, 1)
    assert argument(node_of(lambda x: x.split([1, 3], -1)), "split_size") == [1, 3]
    assert arguments(node_of(lambda x: torch.einsum("abc->ab", x))) is None


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        (lambda x: x.bfloat16(), torch.bfloat16),
        (lambda x: x.to(torch.float16), torch.float16),
        (lambda x: x.to(dtype=torch.float16), torch.float16),
        (lambda x: x.type(torch.float16), torch.float16),
        (lambda x: x.type_as(torch.zeros(1, dtype=torch.float64)), torch.float64),
        (lambda x: torch.ops.aten._to_copy.default(x, dtype=torch.float64), torch.float64),
    ],
)
def test_the_dtype_of_a_cast(spelling, dtype) -> None:
    assert cast_dtype(node_of(spelling)) is dtype
    assert argument(node_of(spelling), "dtype") is dtype


# Activations


class Disguised(nn.Module):
    def forward(self, x):
        return x / (1 + torch.exp(-x))


class SiLU(nn.Module):
    """The name of one thing and the numbers of another."""

    def forward(self, x):
        return x.relu() ** 2


class Clipped(nn.Module):
    def forward(self, x):
        return F.gelu(x).clamp(-10, 10)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (nn.SiLU(), "silu"),
        (nn.SiLU(inplace=True), None),
        (Disguised(), "silu"),
        (SiLU(), "relu2"),
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (lambda x: x * torch.sigmoid(1.702 * x), "quick_gelu"),
        (lambda x: x * torch.sigmoid(1.7 * x), None),
        (Clipped(), None),
        (nn.ReLU(), "relu"),
        (nn.ReLU6(), "relu6"),
        (nn.Sigmoid(), "sigmoid"),
        (torch.tanh, "tanh"),
        (nn.Identity(), "identity"),
        (nn.Sequential(nn.ReLU(), nn.Identity()), "relu"),
        (nn.Dropout(0.5), None),
        (nn.Softmax(dim=-1), None),
        (nn.GLU(), None),
        (nn.PReLU(), None),
        (nn.ELU(alpha=2.0), None),
        (nn.ELU(), "elu"),
        (nn.Mish(), "mish"),
        (nn.Softplus(), "softplus"),
        (lambda x: F.silu(x.float()), "silu"),
        (lambda x: 1 / 0, None),
    ],
)
def test_activations_are_known_by_their_numbers(function, name) -> None:
    found = module_activation(function) if isinstance(function, nn.Module) else function_activation(function)
    assert found == name
    assert name is None or name in ACTIVATIONS


def test_the_activation_of_a_node() -> None:
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = Disguised()
            self.norm = nn.LayerNorm(4)

        def forward(self, x):
            return (
                self.act(x),
                F.gelu(x, approximate="tanh"),
                x.relu(),
                self.norm(x),
                x * x,
                x.to(torch.float64),
                x.relu_(),
            )

    traced = trace(M(), (X,))
    kinds = [activation(node, traced) for node in traced.graph.nodes]
    assert kinds == [None, "silu", "gelu_tanh", "relu", None, None, None, None, None][: len(kinds)]


def test_the_search_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    assert module_activation(nn.Dropout(0.5)) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_another_librarys_function_is_never_run() -> None:
    graph = fx.Graph()
    node = graph.call_function(_launches, (graph.placeholder("x"),))
    assert activation(node, graph) is None


def _launches(x):
    raise SystemExit


def test_a_child_on_meta_is_run_on_the_cpu() -> None:
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.SiLU()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.act(self.linear(x))

    with torch.device("meta"):
        traced = trace(M(), (torch.zeros(2, 4),))
        assert [activation(node, traced) for node in traced.graph.nodes] == [None, None, "silu", None]
