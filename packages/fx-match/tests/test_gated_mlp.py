"""Gated MLPs in every spelling, projections on one input, and values that escape."""

import pytest
import torch
import torch.nn.functional as F
from fx_match import (
    Match,
    Miss,
    Pattern,
    PatternError,
    absent,
    act,
    any_value,
    attr,
    call,
    canonical,
    capture,
    const,
    explain,
    find,
    find_all,
    linear,
    match_at,
    module,
    op,
    opt,
    placeholder,
    reciprocal,
    scalar,
    silu,
    together,
    trace,
    transparent,
    whole,
)
from torch import nn


def gated_mlp() -> Pattern:
    """down(act(gate(x)) * up(x)), the gate and the up projection apart or packed, the product in either order."""
    x = any_value("x")
    activated = act(kind="activation", name="act")(linear("gate")(x)).single_use()
    apart = activated * linear("up")(x)
    packed = op("chunk", dim=-1)(linear("gate_up")(x), 2).named("halves")
    halves = act(kind="activation", name="act")(op("getitem")(packed, 0)) * op("getitem")(packed, 1)
    product = (apart | halves).contained()
    return linear("down")(opt(module(nn.Dropout))(product))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
        self.gate_up = nn.Linear(4, 16)
        self.act = nn.SiLU()
        self.dropout = nn.Dropout(0.0)


class Plain(Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Reversed(Base):
    def forward(self, x):
        return self.down(self.up(x) * self.act(self.gate(x)))


class Statements(Base):
    def forward(self, x):
        gate = self.gate(x)
        up = self.up(x)
        gate = F.silu(gate)
        hidden = torch.mul(gate, up)
        hidden = self.dropout(hidden)
        return self.down(hidden)


class Functional(Base):
    def forward(self, x):
        gate = F.linear(x, self.gate_weight)
        return F.linear(F.gelu(gate, approximate="tanh") * F.linear(x, self.gate_weight), self.down_weight)

    def __init__(self) -> None:
        super().__init__()
        self.gate_weight = nn.Parameter(torch.zeros(8, 4))
        self.down_weight = nn.Parameter(torch.zeros(4, 8))


class Packed(Base):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(up * self.act(gate))


class InPlaceProduct(Base):
    def forward(self, x):
        hidden = self.act(self.gate(x))
        hidden *= self.up(x)
        return self.down(hidden)


SPELLINGS = {
    Plain: "silu",
    Reversed: "silu",
    Statements: "silu",
    Functional: "gelu_tanh",
    Packed: "silu",
    InPlaceProduct: "silu",
}
X = torch.zeros(2, 3, 4)


def traced(module_class):
    result = trace(module_class().eval(), (X,))
    assert result.complete, result.stop
    return result


@pytest.mark.parametrize("module_class", SPELLINGS)
def test_every_spelling_matches(module_class) -> None:
    found = find(gated_mlp(), traced(module_class))
    assert isinstance(found, Match), found
    assert found["activation"] == SPELLINGS[module_class]
    assert found["x"].op == "placeholder"
    assert found.root is found["down"]
    assert found.is_whole
    assert all(span is not None for span in found.spans)


def test_the_match_covers_its_nodes_and_not_its_inputs() -> None:
    found = find(gated_mlp(), traced(Plain))
    assert [node.name for node in found.nodes] == ["gate", "act", "up", "mul", "down"]
    assert "gate" in found
    assert "gate_up" not in found
    assert found.get("gate_up") is None


# Near misses


class TwoInputs(Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x + 1))


class NoProduct(Base):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) + self.up(x))


class Escapes(Base):
    def forward(self, x):
        gate = self.act(self.gate(x))
        return self.down(gate * self.up(x)), gate.sum()


class UpEscapes(Base):
    def forward(self, x):
        up = self.up(x)
        return self.down(self.act(self.gate(x)) * up), up


class SwappedHalves(Base):
    def forward(self, x):
        up, gate = self.gate_up(x).chunk(2, dim=-1)
        return self.down(up * self.act(gate))


class ThreeHalves(Base):
    def forward(self, x):
        gate, up, _, _ = self.gate_up(x).chunk(4, dim=-1)
        return self.narrow(up * self.act(gate))

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(4, 4)


class Subclassed(Base):
    class Quantized(nn.Linear):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.up = self.Quantized(4, 8)

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class GateWritten(Base):
    def forward(self, x):
        gate = self.gate(x)
        gate[..., 0] = 0
        return self.down(self.act(gate) * self.up(x))


class Stops(Base):
    def forward(self, x):
        y = self.down(self.act(self.gate(x)) * self.up(x))
        return y if y.sum() > 0 else -y


@pytest.mark.parametrize(
    ("module_class", "reason"),
    [
        (TwoInputs, "'x' is already x"),
        (NoProduct, "expected mul, found add"),
        (Escapes, "value escapes: act is also used by sum_1"),
        (UpEscapes, "value escapes: up is also used by output"),
        (SwappedHalves, "expected the constant 0, found 1"),
        (ThreeHalves, "expected the constant 2, found 4"),
        (Subclassed, "expected a linear, found call_module up"),
        (GateWritten, "value escapes: gate is also used by setitem"),
    ],
)
def test_near_misses_are_missed_with_the_reason(module_class, reason) -> None:
    found = find(gated_mlp(), traced(module_class))
    assert isinstance(found, Miss)
    assert reason in found.reason


def test_on_a_partial_trace_a_value_that_must_not_escape_is_a_doubt() -> None:
    partial = trace(Stops(), (X,))
    assert not partial.complete
    found = find(gated_mlp(), partial)
    assert isinstance(found, Miss)
    assert "the trace is partial: later uses of" in found.reason
    x = any_value("x")
    assert find(linear()(act("silu")(linear()(x)) * linear()(x)), partial)
    assert "the trace is partial" in find(whole(linear("gate")(x)), partial).reason


def test_a_value_that_is_written_in_place_is_not_what_its_node_computed() -> None:
    x = any_value("x")
    found = find(act("silu")(linear("gate")(x)), traced(GateWritten))
    assert isinstance(found, Miss)
    assert found.reason == "gate is written in place by setitem"


def test_absent_has_three_answers() -> None:
    dropout = absent(module(nn.Dropout))
    assert dropout.check(traced(Plain)) == "absent"
    assert dropout.check(traced(Statements)) == "present"
    assert dropout.check(trace(Stops(), (X,))) == "unknown"
    pattern = linear("down").where(dropout)
    assert find(pattern, traced(Plain))
    assert "should be absent is present" in find(pattern, traced(Statements)).reason
    assert "the trace is partial" in find(pattern, trace(Stops(), (X,))).reason


# Several roots


def test_three_linears_on_one_input() -> None:
    class QKV(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x, y):
            return self.a(x) @ self.b(x).mT @ self.c(x), self.d(y)

    result = trace(QKV(), (X, X))
    pattern = together(*(linear(name)(any_value("x")) for name in ("q", "k", "v")))
    found = find(pattern, result)
    assert [found[name].target for name in "qkv"] == ["a", "b", "c"]
    assert len(find_all(linear(), result)) == 4
    four = together(*(linear(name)(any_value("x")) for name in "qkvg"))
    assert "'x' is already" in find(four, result).reason
    with pytest.raises(PatternError, match="at least two"):
        together(linear())


# The algebra


def test_alternatives_optional_parts_and_transparent_operations() -> None:
    class M(nn.Module):
        def forward(self, x):
            return (x.float().view(-1).double() + 1).relu()

    result = trace(M(), (X.half(),))
    plus = transparent(placeholder("x")) + 1
    assert find(plus, result)
    assert len(find(plus, result).nodes) == 5
    assert not find(transparent(placeholder("x"), {"cast"}) + 1, result)
    assert not find(placeholder("x") + 1, result)
    assert find(op("tanh")(any_value()) | op("relu")(any_value("y")), result)["y"].target == "add"
    assert find(opt(op("relu").named("relu"))(plus), result).root.target == "add"
    assert find(op("tanh", "relu"), result).root.target == "relu"
    assert not find(placeholder("y"), result)


def test_a_cast_to_integers_is_not_looked_through() -> None:
    class M(nn.Module):
        def forward(self, x):
            return x.long().float() + 1

    assert not find(transparent(placeholder("x")) + 1, trace(M(), (X,)))


def test_operators_build_patterns() -> None:
    class M(nn.Module):
        def forward(self, x, y):
            return -((2 - x) / (x - y) ** 3 @ y.mT) * 5 + 1

    x, y = placeholder("x"), placeholder("y")
    pattern = 1 + 5 * -(((2 - x) / (x - y) ** 3) @ op("transpose")(y))
    assert find(whole(pattern), trace(M(), (X, X)))
    assert not find(1 + 5 * -(((x - 2) / (x - y) ** 3) @ op("transpose")(y)), trace(M(), (X, X)))


def test_constants_scalars_and_buffers() -> None:
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("factor", torch.tensor(0.5))
            self.register_buffer("row", torch.ones(4))

        def forward(self, x):
            return (x * self.factor + self.row).clamp(max=3.0)

    result = trace(M(), (X,))
    assert find(any_value() * const(0.5), result)
    assert not find(any_value() * const(0.25), result)
    assert find(any_value() + attr("row", "row"), result)["row"].target == "row"
    assert find(op("clamp", min=None, max=scalar("limit")), result)["limit"] == 3.0
    assert not find(op("clamp", min=scalar(), max=scalar()), result)
    assert not find(op("clamp")(any_value()), result)
    assert "has no argument named 'limit'" in find(op("clamp", max=3.0, limit=1), result).reason


def test_silu_spelt_out_and_reciprocals() -> None:
    class M(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x) + x.reciprocal()

    result = trace(M(), (X,))
    assert find(silu(any_value("x")) + reciprocal(any_value("x")), result)


def test_calls_of_a_function_match_leading_arguments() -> None:
    class M(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x + 1, x * 2, scale=0.5)

    result = trace(M(), (X,))
    attend = call(F.scaled_dot_product_attention, "attention")
    found = find(attend(any_value("q"), op("add"), op("mul")), result)
    assert found["attention"].kwargs == {"scale": 0.5}
    assert not find(attend(op("add")), result)
    assert not find(call(F.softmax), result)


def test_where_sees_the_node_and_the_subject() -> None:
    wide = linear("wide").where(lambda node, subject: subject.value(node).shape[-1] == 16, "not 16 wide")
    assert find(wide, traced(Packed))
    assert find(wide, traced(Plain)).reason == "not 16 wide"


def test_match_at_looks_at_one_node_only() -> None:
    result = traced(Plain)
    gate = next(node for node in result.graph.nodes if node.name == "gate")
    assert match_at(linear(), gate, result).root is gate
    assert not match_at(op("mul"), gate, result)


def test_captures_are_the_same_value_each_time() -> None:
    class M(nn.Module):
        def forward(self, x):
            return (x + 1) * (x + 2), (x + 3) * (x + 3)

    result = trace(M(), (X,))
    different = (any_value() + scalar("n")) * (any_value() + scalar("n"))
    assert find(different, result)["n"] == 3
    assert find_all(op("add")(any_value(), capture("n")), result)[0]["n"] == 1


def test_mistakes_in_patterns() -> None:
    with pytest.raises(PatternError, match="unknown activations"):
        act("swish")
    with pytest.raises(PatternError, match="needs a name"):
        capture("")
    with pytest.raises(PatternError, match="canonical name"):
        op()
    with pytest.raises(TypeError, match="patterns match in a Trace"):
        find(op("mul"), nn.Linear(2, 2))


def test_patterns_are_values() -> None:
    assert linear("gate")(any_value("x")) == linear("gate")(any_value("x"))
    assert len({op("mul"), op("mul"), op("add")}) == 2


# Explanations


def test_explain_says_what_matched_and_where() -> None:
    text = explain(gated_mlp(), traced(Plain))
    assert text.startswith("matched down (5 nodes)")
    assert f"gate = gate [call_module gate], {__file__}:{Plain.forward.__code__.co_firstlineno + 1}" in text
    assert "activation = 'silu'" in text


def test_explain_says_what_failed_with_the_source_line() -> None:
    text = explain(gated_mlp(), traced(NoProduct))
    assert "no match: expected a child module (Dropout), found add; or expected mul, found add" in text
    assert "    return self.down(self.act(self.gate(x)) + self.up(x))" in text
    assert "nearest attempt matched 1 nodes: down [call_module down]" in text
    assert "the trace is partial" in explain(gated_mlp(), trace(Stops(), (X,)))


def test_loops_are_covered_one_by_one() -> None:
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    result = trace(M(), (X,))
    found = find_all(linear("outer")(linear("inner")), result)
    assert len(found) == 1
    assert len(result.spans_hit(result.span(found[0].root))) == 3
    assert {canonical(node) for node in found[0].nodes} == {"module"}
