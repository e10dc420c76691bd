"""The protocol, the list of fusions, and what a fusion may ask of a trace and its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ast_rewrite import FunctionSource, Patch, Refused
from torch import nn
from vllm_layers_bridge import FUSIONS, BridgeError, NotBuildable, NotFusable, WrongLayout
from vllm_layers_bridge.fusions import Fusion, ModuleFacts
from vllm_layers_bridge.fusions.children import is_plain_linear, linears_above, only_input, other_use
from vllm_layers_bridge.fusions.source import (
    argument_span,
    is_path_known,
    projection_spans,
    pure_calls,
    source_span,
    stands_for_itself,
)

X = torch.empty(1, 3, 4, device="meta")


def test_every_fusion_has_all_parts_and_a_name_of_its_own() -> None:
    assert all(isinstance(fusion, Fusion) for fusion in FUSIONS)
    assert [fusion.name for fusion in FUSIONS] == [
        "rms_norm",
        "gated_mlp",
        "gate_up",
        "packed_gated_mlp",
        "qkv",
        "packed_qkv",
        "rotary",
        "attention_calls",
        "row_positions",
    ]


def test_fusions_that_replace_a_module_come_before_those_that_edit_one() -> None:
    replacing = [fusion.replaces_module for fusion in FUSIONS]
    assert replacing == sorted(replacing, reverse=True)


def test_an_object_that_lacks_a_part_is_no_fusion() -> None:
    class Half:
        name = "half"
        replaces_module = False

        def match(self, trace: Any) -> None: ...

    assert not isinstance(Half(), Fusion)


def test_errors_have_one_base() -> None:
    assert all(issubclass(error, BridgeError) for error in (NotBuildable, NotFusable, WrongLayout))


def test_facts_say_nothing_unless_told() -> None:
    facts = ModuleFacts("mlp")
    assert (facts.attention, facts.args, facts.kwargs) == ((), None, None)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        z = self.b(y.view(x.shape))
        return self.mix(y, z)

    def mix(self, y, z):
        return y + z


def test_linears_above_a_value_are_the_nearest_on_every_path(traced: Callable[..., Any]) -> None:
    seen = traced(Two(), X)
    by_name = {node.name: node for node in seen.graph.nodes}
    assert [node.name for node in linears_above(by_name["b"].args[0], seen)] == ["a"]
    assert {node.name for node in linears_above(by_name["add"], seen)} == {"a", "b"}
    assert linears_above(by_name["x"], seen) == []
    assert linears_above(3, seen) == []


def test_what_counts_as_a_plain_linear() -> None:
    hooked, own = nn.Linear(4, 4), nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    own.forward = lambda x: x
    weight_normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    assert is_plain_linear(nn.Linear(4, 4))
    assert [is_plain_linear(m) for m in (hooked, own, weight_normed, nn.Identity(), None)] == [False] * 5


def test_the_only_input_of_a_call(traced: Callable[..., Any]) -> None:
    nodes = {node.name: node for node in traced(Two(), X).graph.nodes}
    assert only_input(nodes["a"]) is nodes["x"]
    assert only_input(nodes["add"]) is None
    assert other_use(traced(Two(), X), nodes["a"]) is None


def test_a_node_of_a_helper_has_no_span_of_its_own(traced: Callable[..., Any]) -> None:
    seen = traced(Two(), X)
    nodes = {node.name: node for node in seen.graph.nodes}
    source = FunctionSource.of(Two.forward)
    assert source.segment(source_span(seen, nodes["a"])) == "self.a(x)"
    with pytest.raises(Refused, match="made in `mix`"):
        source_span(seen, nodes["add"])
    with pytest.raises(Refused, match="only the forward itself"):
        source_span(seen, nodes["x"])


def test_the_argument_of_a_call(traced: Callable[..., Any]) -> None:
    seen = traced(Two(), X)
    nodes = {node.name: node for node in seen.graph.nodes}
    patch = Patch(FunctionSource.of(Two.forward))
    call, argument = projection_spans(seen, patch, nodes["a"])
    assert (patch.text(call), patch.text(argument)) == ("self.a(x)", "x")
    view = next(node for node in seen.graph.nodes if node.target == "view")
    with pytest.raises(Refused, match="is no call of a child"):
        projection_spans(seen, patch, view)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("self.a(x, y)", "has 2 arguments"), ("self.a(*x)", "has 1 arguments"), ("self.a(**x)", "has 1 arguments")],
)
def test_a_call_of_other_than_one_argument_is_refused(text: str, reason: str, tmp_path: Any) -> None:
    import importlib.util

    path = tmp_path / "calls.py"
    path.write_text(f"class M:\n    def forward(self, x, y):\n        return {text}\n")
    spec = importlib.util.spec_from_file_location("calls", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    patch = Patch(FunctionSource.of(module.M.forward))
    from ast_rewrite import SourceSpan

    with pytest.raises(Refused, match=reason):
        argument_span(patch, SourceSpan(3, 15, 3, 15 + len(text)))


class Sized(Two):
    def forward(self, x):
        if x.shape[0] > 9:
            return x
        return self.a(x)


class Typed(Two):
    def forward(self, x):
        if x.dtype == torch.float16:
            return x
        return self.a(x)


@pytest.mark.parametrize(("cls", "known"), [(Two, True), (Typed, True), (Sized, False)])
def test_a_path_is_known_unless_it_hung_on_the_sample(
    traced: Callable[..., Any], cls: type[nn.Module], known: bool
) -> None:
    assert is_path_known(traced(cls(), X)) is known


def write(x):
    x.mul_(2)
    return x


def read(x):
    return x * 2


class Calls(Two):
    def forward(self, x):
        y = read(self.a(x))
        z = write(self.b(x))
        return y + z


def test_a_helper_is_pure_if_it_wrote_nothing_in_the_trace(traced: Callable[..., Any]) -> None:
    import ast

    seen = traced(Calls(), X)
    is_pure = pure_calls(seen)
    calls = {
        ast.unparse(node.func): node
        for node in ast.walk(FunctionSource.of(Calls.forward).tree)
        if isinstance(node, ast.Call)
    }
    assert is_pure(calls["read"])
    assert not is_pure(calls["write"])


class Expressions(Two):
    def forward(self, x, scale: int = 2):
        torch.mul(self.a(x), self.b(x))
        scale * self.a(x)
        self.a(x) + self.b(x)
        self.a(x) if scale else self.b(x)
        self.a(x) * self.b(x)
        return x


def test_products_of_calls_stand_for_themselves_and_nothing_else_does() -> None:
    import ast

    from ast_rewrite import SourceSpan

    source = FunctionSource.of(Expressions.forward)
    names = [n for n in ast.walk(source.tree) if isinstance(n, ast.Name) and n.id == "x"]
    inputs = tuple(SourceSpan.of(name) for name in names)
    statements = [s.value for s in source.tree.body if isinstance(s, ast.Expr)]
    assert [stands_for_itself(source, SourceSpan.of(value), inputs) for value in statements] == [
        True, False, False, False, True,
    ]  # fmt: skip
