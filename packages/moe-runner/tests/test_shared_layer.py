"""Shared experts in vLLM's runner are added once, as they are: no factor of the router, no gate left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from moe_runner import (
    ExpertsSpec,
    ExpertTensor,
    Gate,
    RouterForm,
    Routing,
    SharedExperts,
    SharedSpec,
    build_experts,
    build_shared,
    route,
)
from tf_tools.expert_weights import fill_experts
from torch import Tensor, nn
from torch.nn import functional as F

E, H, M, K, T = 4, 64, 64, 2, 9
TENSORS = (ExpertTensor("gate_up", ("gate", "up")), ExpertTensor("down", ("down",)))
SPEC = ExpertsSpec(E, K, H, M, Gate("silu"), TENSORS, (0, 1, 2), runs_as="silu")
FORM = RouterForm("sigmoid", renormalised=True, scaling=2.5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all_of_it = nn.Sequential(nn.Linear(H, M), nn.SiLU(), nn.Linear(M, H))
        self.taste = nn.Linear(H, 1)
        self.seen: list[tuple[int, ...]] = []
        self.all_of_it.register_forward_pre_hook(lambda _, args: self.seen.append(tuple(args[0].shape)))


@pytest.mark.parametrize("ndim", [2, 3])
def test_they_are_called_as_the_block_called_them(ndim: int) -> None:
    block, x = Block(), torch.randn(T, H)
    module = SharedExperts(SharedSpec("", "all_of_it", "taste", ndim=ndim), block)
    assert torch.allclose(module(x), torch.sigmoid(block.taste(x)) * block.all_of_it(x), atol=1e-6)
    assert block.seen[0] == ((T, H) if ndim == 2 else (1, T, H))


def test_they_hold_no_weights_and_follow_their_block() -> None:
    block, x = Block(), torch.randn(T, H)
    module = SharedExperts(SharedSpec("", "all_of_it"), block)
    assert not list(module.named_parameters(remove_duplicate=False))
    block.all_of_it = nn.Linear(H, H)
    assert torch.equal(module(x), block.all_of_it(x))


def test_a_rank_that_is_not_counted_gives_zeros() -> None:
    x = torch.randn(T, H)
    assert not SharedExperts(SharedSpec("", "all_of_it"), Block(), is_counted=False)(x).any()


def run(dtype: torch.dtype, gate: str, is_inside: bool, is_compiled: bool = False) -> dict[str, float]:
    """Differences from what is right, and from what is not, as parts of the largest entry."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    block = Block()
    block.requires_grad_(False)
    shared = SharedSpec("", "all_of_it", gate, ndim=3)
    spec = msgspec.structs.replace(SPEC, shared=shared, routing=Routing(FORM) if is_inside else None)
    layer: Any = build_experts(spec, "model.layers.0.experts", shared=build_shared(shared, block))
    values = {"gate_up": torch.randn(E, 2 * M, H) * 0.2, "down": torch.randn(E, H, M) * 0.2}
    fill_experts(layer, spec, values)
    x, logits = torch.randn(1, T, H), torch.randn(T, E, dtype=torch.float32)
    weights, ids = route(FORM, logits, None, K)
    if is_compiled:
        layer = torch.compile(layer, fullgraph=True, backend="eager")
    found = layer(x, ids, logits if is_inside else weights).float()
    assert torch.equal(found, layer(x, ids, logits if is_inside else weights).float()), "something is left from a run"
    experts = _experts(x[0].float(), values, weights, ids).view_as(x)
    beside = block.all_of_it(x).float()
    factor = torch.sigmoid(block.taste(x)).float() if gate else torch.ones(1, T, 1)
    right = experts + factor * beside
    wrong = {
        "dropped": experts,
        "twice": right + factor * beside,
        "ungated": experts + beside,
        "scaled": experts + 2.5 * factor * beside,
        "not scaled": experts / 2.5 + factor * beside,
        "all divided": right / 2.5,
    }
    return {name: _apart(found, value) for name, value in (("right", right), *wrong.items())}


def _experts(x: Tensor, values: dict[str, Tensor], weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for token in range(T):
        for expert, share in zip(ids[token], weights[token], strict=True):
            gate, up = (x[token] @ values["gate_up"][expert].float().T).chunk(2)
            out[token] += share * ((F.silu(gate) * up) @ values["down"][expert].float().T)
    return out


def _apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.engine
@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("gate", ["", "taste"])
def test_the_sum_is_right_and_nothing_else(gate: str, is_inside: bool, in_vllm: Callable[..., Any]) -> None:
    apart = in_vllm(run, torch.float32, gate, is_inside)
    assert apart.pop("right") < 1e-5
    if not gate:
        apart.pop("ungated")
    assert min(apart.values()) > 1e-2, apart


@pytest.mark.engine
def test_one_graph_holds_the_sum(in_vllm: Callable[..., Any]) -> None:
    apart = in_vllm(run, torch.float32, "taste", True, True)
    assert apart.pop("right") < 1e-5
    assert min(apart.values()) > 1e-2, apart


@pytest.mark.parametrize("shared", [SharedSpec("", "all_of_it"), None])
def test_shared_experts_go_with_a_spec_that_has_them(shared: SharedSpec | None) -> None:
    spec = msgspec.structs.replace(SPEC, shared=shared)
    module = None if shared is not None else SharedExperts(SharedSpec("", "all_of_it"), Block())
    with pytest.raises(ValueError, match="shared experts go with a spec that has them"):
        build_experts(spec, "layers.0", shared=module)


@pytest.mark.engine
def test_half_precision_keeps_the_factor(in_vllm: Callable[..., Any]) -> None:
    """vLLM's runner divides shared experts by the factor there, and leaves the routed ones: its own models make up for it."""
    apart = in_vllm(run, torch.float16, "", True)
    assert apart["right"] < 1e-2
    assert min(apart["scaled"], apart["not scaled"], apart["all divided"]) > 4e-2
