"""Routing inside vLLM's runner: what routers give logits for, what the engine has, and that its numbers are the form's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from moe_runner import (
    ExpertsSpec,
    RoutedExperts,
    RouterForm,
    RouterLogits,
    RouterSpec,
    Routing,
    build_experts,
    build_router,
    gate_parameters,
    probes,
    route,
    why_not_engine,
)
from moe_runner.layer import within_reach
from torch import Tensor, nn

E, H, K, T = 16, 64, 3, 9
SpecOf = Callable[..., ExpertsSpec]
FORMS = tuple(probes(4, 2))


def routed_spec(experts_spec: SpecOf, form: RouterForm) -> ExpertsSpec:
    return experts_spec(E, K, arguments=(0, 1, 2), runs_as="silu", routing=Routing(form))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(E, H)), nn.Parameter(torch.randn(1, E))
        self.inner = nn.Linear(H, E)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_gives_its_logits(dtype: torch.dtype) -> None:
    router = Router().to(dtype)
    x = torch.randn(2, 5, H, dtype=dtype)
    layer = RouterLogits(RouterSpec("w", "x", 3, True, bias="b"), router)
    given = layer(x=x)
    assert len(given) == 3
    assert all(value is given[0] for value in given)
    assert given[0].dtype == torch.float32
    assert torch.equal(given[0], x.view(10, H).float() @ router.w.float().T + router.b.float())
    assert RouterLogits(RouterSpec("w", 0, 1, False), router)(x)[0].dtype == dtype
    assert {name: id(p) for name, p in layer.named_parameters()} == {n: id(p) for n, p in router.named_parameters()}


def test_a_gate_takes_the_tensors_of_its_router() -> None:
    router, gate = Router(), nn.Linear(H, E)
    spec = RouterSpec("w", 0, 2, float32=True, bias="b", engine_gate=True)
    layer = RouterLogits(spec, router, gate)
    assert gate_parameters(spec) == {"w": "engine_gate.weight", "b": "engine_gate.bias"}
    assert {name for name, _ in layer.named_parameters()} == {
        *gate_parameters(spec).values(),
        "inner.weight",
        "inner.bias",
    }
    x = torch.randn(2, 5, H)
    assert torch.equal(layer(x)[1], gate(x.view(10, H)))
    assert gate_parameters(RouterSpec("w", 0, 2, float32=True)) == {}


def gates() -> dict[str, float]:
    """For each kind of gate of the engine's, how far its logits are from the product in float64, of their largest."""
    found = {}
    kinds = itertools.product(
        (torch.float32, torch.bfloat16), (torch.float32, torch.bfloat16), (True, False), ("", "b")
    )
    for at, (dtype, given, float32, bias) in enumerate(kinds):
        if (given, dtype, float32) == (torch.bfloat16, torch.float32, False):
            continue  # the model's own product would fail
        torch.manual_seed(at)
        router = Router()
        router.b = nn.Parameter(router.b.view(-1))
        torch.set_default_dtype(dtype)
        layer = build_router(
            RouterSpec("w", 0, 1, float32, bias=bias, engine_gate=True), router, f"model.layers.{at}.gate"
        )
        torch.set_default_dtype(torch.float32)
        gate: Any = layer.engine_gate
        w, b = router.w.to(dtype), router.b.to(dtype)
        gate.weight_loader(gate.weight, w)
        if bias:
            gate.weight_loader(gate.bias, b)
        gate.quant_method.process_weights_after_loading(gate)
        x = torch.randn(T, H).to(given)
        (logits,) = layer(x)
        assert logits.dtype == (torch.float32 if float32 else dtype)
        exact = x.double() @ w.double().T + (b.double() if bias else 0.0)
        found[f"{dtype} {given} {float32} {bias}"] = float((logits - exact).abs().max() / exact.abs().max())
    return found


@pytest.mark.engine
def test_the_gate_of_the_engine_gives_logits_in_the_type_of_the_router(in_vllm: Callable[..., Any]) -> None:
    """Those of float32 are not rounded to 16 bits on the way, whatever the weight is in: 1 in 256 of the largest would show."""
    found = in_vllm(gates)
    assert len(found) == 14
    assert max(value for kind, value in found.items() if "True" in kind or kind.startswith("torch.float32")) < 1e-5, (
        found
    )
    assert 1e-5 < max(found.values()) < 1e-2, found


def test_a_layer_of_the_router_is_called_whatever_takes_its_place() -> None:
    layer = RouterLogits(RouterSpec("inner.weight", 0, 2, False, bias="inner.bias", child="inner"), Router())
    layer.inner = nn.Identity()
    assert torch.equal(layer(torch.ones(3, E))[0], torch.ones(3, E))


def test_logits_reach_the_runner_as_they_are(experts_spec: SpecOf) -> None:
    class Runner(nn.Module):
        def forward(self, hidden: Tensor, scores: Tensor) -> Tensor:
            assert scores.shape == (6, E)
            assert scores.dtype == torch.float32
            return hidden * scores.sum(dim=-1, keepdim=True)

    x, logits = torch.randn(2, 3, H), torch.randn(6, E)
    out = RoutedExperts(routed_spec(experts_spec, RouterForm("softmax")), Runner())(x, logits, logits)
    assert torch.allclose(out, x * logits.sum(-1).view(2, 3, 1))


def test_what_the_engine_lacks_is_told() -> None:
    form = RouterForm("sigmoid", biased=True, renormalised=True)
    assert why_not_engine(form, [form.name]) == ""
    assert (
        why_not_engine(form, ["softmax"]) == "its router is sigmoid biased renormalised, and the engine's are softmax"
    )
    assert why_not_engine(msgspec.structs.replace(form, epsilon=1e-20), [form.name]) == ""
    assert "their sum plus 1e-06" in why_not_engine(msgspec.structs.replace(form, epsilon=1e-6), [form.name])
    floor = msgspec.structs.replace(form, epsilon=1e-3, epsilon_is_floor=True)
    assert "no less than 0.001" in why_not_engine(floor, [form.name])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_an_epsilon_that_is_left_out_matters_below_the_bound_alone(score: Any) -> None:
    """Off by no more than the epsilon's part of the sum; and where all scores vanish, finite."""
    exact = RouterForm(score, biased=True, renormalised=True, epsilon=1e-20)
    without = msgspec.structs.replace(exact, epsilon=0.0)
    correction = torch.linspace(-6.0, 6.0, E)
    logits = torch.randn(64, E) * torch.linspace(0.1, 8.0, 64)[:, None]
    sums = route(RouterForm(score, biased=True), logits, correction, K)[0].sum(-1)
    assert float(sums.min()) > 1e-15
    wanted, found = route(exact, logits, correction, K), route(without, within_reach(exact, logits), correction, K)
    assert torch.equal(wanted[1], found[1])
    assert torch.allclose(wanted[0], found[0], rtol=1e-5, atol=0.0)
    low = torch.full((1, E), -200.0)
    low[0, 0] = 0.0 if score == "softmax" else -200.0
    assert bool(route(without, low, correction, K)[0].isnan().any())
    assert bool(route(without, within_reach(exact, low), correction, K)[0].isfinite().all())
    assert within_reach(without, low) is low


def test_a_correction_goes_with_a_form_that_has_one(experts_spec: SpecOf) -> None:
    with pytest.raises(ValueError, match="a correction goes with"):
        build_experts(
            routed_spec(experts_spec, RouterForm("softmax")), "model.layers.0.experts", correction=torch.zeros(E)
        )
    with pytest.raises(ValueError, match="a correction goes with"):
        build_experts(routed_spec(experts_spec, RouterForm("softmax", biased=True)), "model.layers.0.experts")


def difference(spec: ExpertsSpec, prefix: str, loaded_experts: Callable[..., Any]) -> float:
    """The largest difference from the formula, of the size of what it gives."""
    torch.manual_seed(0)
    assert spec.routing is not None
    form = spec.routing.form
    correction = torch.empty(1, E) if form.biased else None
    layer, formula = loaded_experts(spec, prefix, 0.2, correction)
    if correction is not None:
        correction.copy_(torch.rand(1, E) * 2 - 1.5)  # loaded after it was handed over
    x, logits = torch.randn(T, H), torch.randn(T, E) * 2
    shares, ids = route(form, logits, None if correction is None else correction.view(-1), K)
    expected = formula(x, ids, shares)
    found = layer(x, ids, logits)
    return float((found - expected).abs().max() / expected.abs().max())


def differences(experts_spec: SpecOf, loaded_experts: Callable[..., Any]) -> dict[str, float]:
    scaled = [msgspec.structs.replace(form, scaling=2.5) for form in FORMS if form.renormalised]
    kinds = {(False, "max"), (True, "top2")}
    wanted = [form for form in (*FORMS, *scaled) if form.groups == 1 or (form.biased, form.group_score) in kinds]
    return {
        str(form): difference(routed_spec(experts_spec, form), f"model.layers.{at}.experts", loaded_experts)
        for at, form in enumerate(wanted)
    }


@pytest.mark.engine
def test_the_engine_routes_as_the_form_says(
    in_vllm: Callable[..., Any], experts_spec: SpecOf, loaded_experts: Callable[..., Any]
) -> None:
    found = in_vllm(differences, experts_spec, loaded_experts)
    assert len(found) == 24
    assert max(found.values()) < 1e-5, found
