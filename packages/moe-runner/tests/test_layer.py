"""Experts in vLLM's runner give what their formula says, with the ids and weights that they are handed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from moe_runner import (
    ACTIVATIONS,
    ExpertsSpec,
    ExpertTensor,
    Gate,
    NotRunnable,
    RoutedExperts,
    asked_of_engine,
    build_experts,
    engine_activation,
)
from moe_runner.layer import as_given
from torch import Tensor, nn

E, H, K, T = 4, 64, 2, 9
SpecOf = Callable[..., ExpertsSpec]
BIASES = (ExpertTensor("gate_up_bias", ("gate", "up"), bias=True), ExpertTensor("down_bias", ("down",), bias=True))


class Runner(nn.Module):
    """Stands for vLLM's runner: experts that multiply by their number plus one."""

    def forward(self, hidden: Tensor, scores: Tensor) -> Tensor:
        weights, ids = as_given(hidden, scores, K, renormalize=False)
        assert ids.dtype == torch.int32
        assert ids.is_contiguous()
        assert int(ids.max()) < E
        return hidden * (weights * (ids + 1)).sum(dim=-1, keepdim=True)


X, CHOSEN, SHARES = torch.randn(1, 3, H), torch.tensor([[0, 3], [2, 1], [1, 0]]), torch.rand(3, K) - 0.2


def test_ids_and_weights_arrive_as_they_were_given(experts_spec: SpecOf) -> None:
    out = RoutedExperts(experts_spec(E, K), Runner())(X, CHOSEN, weights=SHARES)
    assert torch.allclose(out, X * (SHARES * (CHOSEN + 1)).sum(-1, keepdim=True))


def test_ranks_with_experts_of_their_own_add_up(experts_spec: SpecOf) -> None:
    class Rank(nn.Module):
        def __init__(self, mine: list[int]) -> None:
            super().__init__()
            self.mine = torch.tensor(mine)

        def forward(self, hidden: Tensor, scores: Tensor) -> Tensor:
            weights, ids = as_given(hidden, scores, K, renormalize=False)
            return hidden * (weights * (self.mine[ids] + 1)).sum(dim=-1, keepdim=True)

    parts = []
    for mine in ([1], [3, 0, 2]):
        places = torch.full((E,), -1, dtype=torch.int32)
        places[mine] = torch.arange(len(mine), dtype=torch.int32)
        parts.append(RoutedExperts(experts_spec(E, K), Rank(mine), places)(X, CHOSEN, weights=SHARES))
    whole = RoutedExperts(experts_spec(E, K), Runner())(X, CHOSEN, weights=SHARES)
    assert not torch.allclose(parts[0], whole)
    assert torch.allclose(sum(parts), whole)


@pytest.mark.parametrize(("null", "share"), [("identity", 1.0), ("zero", 0.0)])
def test_ids_beyond_the_experts_never_reach_the_runner(null: Any, share: float, experts_spec: SpecOf) -> None:
    beyond = torch.tensor([[0, E], [E + 1, 1], [1, 0]])
    out = RoutedExperts(experts_spec(E, K, null=null), Runner())(X, beyond, weights=SHARES)
    factor = torch.where(beyond >= E, torch.tensor(share), beyond + 1.0)
    assert torch.allclose(out, X * (SHARES * factor).sum(-1, keepdim=True))


def test_a_limit_of_the_models_own_is_never_the_engines() -> None:
    assert engine_activation(Gate("swiglu_oai", limit=7.0, alpha=1.702), ["silu", "swigluoai"]) == "swigluoai"
    assert engine_activation(Gate("swiglu_oai", limit=1.5, alpha=1.702), ["silu", "swigluoai"]) is None
    assert engine_activation(Gate("silu_clamped", limit=7.0), ["silu", "swigluoai"]) is None
    adjusted = engine_activation(Gate("swiglu_oai", limit=1.5, alpha=1.2), ["swigluoai", "swigluoai_uninterleave"])
    assert adjusted == "swigluoai_uninterleave"
    asked = asked_of_engine(Gate("swiglu_oai", limit=1.5, alpha=1.2), adjusted)
    assert (asked.limit, asked.alpha, asked.beta, asked.interleaved) == (1.5, 1.2, 1.0, False)
    clamped = asked_of_engine(Gate("silu_clamped", limit=3.0), "silu_clamped")
    assert (clamped.name, clamped.limit) == ("silu", 3.0)


def run(name: str, with_biases: bool, experts_spec: SpecOf, loaded_experts: Callable[..., Any]) -> tuple[float, float]:
    """The largest difference from the formula, and the size of what it gives."""
    torch.manual_seed(0)
    spec = experts_spec(E, K, gate=ACTIVATIONS[name], runs_as=name)
    if with_biases:
        spec = msgspec.structs.replace(spec, tensors=(*spec.tensors, *BIASES))
    layer, formula = loaded_experts(spec, f"model.layers.{len(spec.tensors)}.{name}", 0.4)
    x, weights = torch.randn(T, H), torch.rand(T, K) - 0.3
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    expected = formula(x, ids, weights)
    found = layer(x, ids, weights=weights)
    return float((found - expected).abs().max()), float(expected.abs().max())


def run_all(names: list[str], *fixtures: Any) -> dict[tuple[str, bool], tuple[float, float]]:
    return {(name, with_biases): run(name, with_biases, *fixtures) for name in names for with_biases in (False, True)}


def build(spec: ExpertsSpec) -> str:
    try:
        build_experts(spec, "model.layers.0.odd")
    except NotRunnable as error:
        return str(error)
    return ""


@pytest.mark.engine
def test_every_kernel_of_the_cpu_build_computes_what_it_is_asked(
    in_vllm: Callable[..., Any], experts_spec: SpecOf, loaded_experts: Callable[..., Any]
) -> None:
    found = in_vllm(run_all, ["silu", "gelu", "gelu_tanh", "swigluoai"], experts_spec, loaded_experts)
    assert len(found) == 8
    for name, (difference, size) in found.items():
        assert difference < 1e-5 * size, name


@pytest.mark.engine
def test_sizes_without_a_kernel_are_told(in_vllm: Callable[..., Any], experts_spec: SpecOf) -> None:
    odd = msgspec.structs.replace(experts_spec(E, K, runs_as="silu"), hidden_size=40)
    text = in_vllm(build, odd)
    assert "model.layers.0.odd" in text
    assert "backend supports" in text


def test_an_activation_must_be_chosen_before_building(experts_spec: SpecOf) -> None:
    with pytest.raises(NotRunnable, match="runs_as"):
        build_experts(experts_spec(E, K), "model.layers.0.mlp.experts")
