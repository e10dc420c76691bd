"""Tensors of experts as a model holds them reach the runner's merged weights expert by expert, half by half, this rank's share alone."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moe_runner import LOADER, ExpertsSpec, ExpertTensor, Gate, parameter_of
from moe_runner._loading import ExpertLoader
from torch import Tensor, nn

E, H, M = 4, 6, 8
BOTH = ExpertTensor("gate_up", ("gate", "up"))


class Routed(nn.Module):
    """Stands for vLLM's module of expert weights: notes what its loader is given."""

    def __init__(self, rank: int = 0, ranks: int = 1, local: tuple[int, ...] = tuple(range(E))) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(len(local), 2 * M // ranks, H))
        self.w13_bias = nn.Parameter(torch.zeros(len(local), 2 * M // ranks))
        self.w2_bias = nn.Parameter(torch.zeros(len(local), H))
        self.moe_config = SimpleNamespace(tp_rank=rank, tp_size=ranks)
        self.expert_map_manager = SimpleNamespace(map_global_to_local=lambda e: local.index(e) if e in local else -1)
        self.given: list[tuple[str, str, int, Tensor]] = []

    def weight_loader(self, parameter: Tensor, part: Tensor, name: str, shard: str, expert: int) -> None:
        self.given.append((name, shard, expert, part))


def loaded(
    routed: Routed, name: str, value: Tensor, tensor: ExpertTensor, gate: Gate | None = None, interleaved: bool = False
) -> dict[tuple[str, int], Tensor]:
    spec = ExpertsSpec(E, 2, H, M, gate or Gate("silu"), (tensor,), (0, 1, 2))
    ExpertLoader(spec, interleaved, routed).attach()
    parameter = routed.get_parameter(name)
    getattr(parameter, LOADER)(parameter, value, tensor)
    assert all(given == name for given, *_ in routed.given)
    return {(shard, expert): part for _, shard, expert, part in routed.given}


GATES, UPS = torch.randn(E, M, H), torch.randn(E, M, H)


@pytest.mark.parametrize(
    ("value", "tensor"),
    [
        (torch.cat((GATES, UPS), 1), BOTH),
        (torch.cat((UPS, GATES), 1), ExpertTensor("t", ("up", "gate"))),
        (torch.stack((GATES, UPS), 2).flatten(1, 2), ExpertTensor("t", ("gate", "up"), interleaved=True)),
        (torch.cat((GATES, UPS), 1).transpose(1, 2), ExpertTensor("t", ("gate", "up"), transposed=True)),
        (torch.cat((GATES, UPS), 1).flatten(0, 1), ExpertTensor("t", ("gate", "up"), packed=True)),
    ],
)
def test_every_layout_gives_the_same_shards(value: Tensor, tensor: ExpertTensor) -> None:
    given = loaded(Routed(), "w13_weight", value, tensor)
    assert set(given) == {(shard, expert) for shard in ("w1", "w3") for expert in range(E)}
    for expert in range(E):
        assert torch.equal(given["w1", expert], GATES[expert])
        assert torch.equal(given["w3", expert], UPS[expert])


def test_one_tensor_of_one_expert() -> None:
    given = loaded(Routed(), "w13_weight", UPS[2], ExpertTensor("2.up", ("up",), expert=2))
    assert list(given) == [("w3", 2)]


def test_without_a_gate_the_only_projection_is_the_first() -> None:
    given = loaded(Routed(), "w13_weight", UPS, ExpertTensor("up", ("up",)), Gate("relu2", gated=False))
    assert {shard for shard, _ in given} == {"w1"}


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_add_the_bias_of_the_sum_once(rank: int) -> None:
    value = torch.randn(E, H)
    given = loaded(Routed(rank, 2), "w2_bias", value, ExpertTensor("b", ("down",), bias=True))
    assert torch.equal(given["w2", 3], value[3] if rank == 0 else torch.zeros(H))


def test_on_ranks_that_hold_whole_experts_each_adds_its_own_bias() -> None:
    value = torch.randn(E, H)
    given = loaded(Routed(0, 1, local=(2, 3)), "w2_bias", value, ExpertTensor("b", ("down",), bias=True))
    assert torch.equal(given["w2", 3], value[3])


@pytest.mark.parametrize("rank", [0, 1])
def test_alternating_rows_are_split_by_features(rank: int) -> None:
    routed = Routed(rank, 2)
    assert loaded(routed, "w13_weight", torch.cat((GATES, UPS), 1), BOTH, interleaved=True) == {}
    mine = slice(rank * M // 2, (rank + 1) * M // 2)
    assert torch.equal(routed.w13_weight[:, 0::2], GATES[:, mine])
    assert torch.equal(routed.w13_weight[:, 1::2], UPS[:, mine])


def test_alternating_rows_of_experts_elsewhere_are_left_out() -> None:
    routed = Routed(local=(3, 1))
    bias = torch.randn(E, 2 * M)
    loaded(routed, "w13_bias", bias, ExpertTensor("b", ("gate", "up"), bias=True), interleaved=True)
    assert torch.equal(routed.w13_bias[0, 0::2], bias[3, :M])
    assert torch.equal(routed.w13_bias[1, 1::2], bias[1, M:])


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        (BOTH, "w13_weight"),
        (ExpertTensor("t", ("up",)), "w13_weight"),
        (ExpertTensor("t", ("down",)), "w2_weight"),
        (ExpertTensor("t", ("down",), bias=True), "w2_bias"),
    ],
)
def test_where_a_tensor_goes(tensor: ExpertTensor, name: str) -> None:
    assert parameter_of(tensor) == f"runner.routed_experts.{name}"


def test_each_parameter_gets_a_loader_of_its_own() -> None:
    routed = Routed()
    spec: Any = ExpertsSpec(E, 2, H, M, Gate("silu"), (BOTH,), (0, 1, 2))
    ExpertLoader(spec, False, routed).attach()
    getattr(routed.w2_bias, LOADER)(routed.w2_bias, torch.randn(E, H), ExpertTensor("b", ("down",), bias=True))
    assert {name for name, *_ in routed.given} == {"w2_bias"}


def test_a_parameter_that_is_replaced_is_gone_at_once() -> None:
    """The engine packs weights into new parameters and puts off the collector: one in a cycle would be held beside its successor."""
    routed = Routed()
    spec = ExpertsSpec(E, 2, H, M, Gate("silu"), (BOTH,), (0, 1, 2))
    ExpertLoader(spec, False, routed).attach()
    replaced = weakref.ref(routed.w13_weight)
    gc.disable()
    try:
        routed.w13_weight = nn.Parameter(torch.zeros(1))
        assert replaced() is None
    finally:
        gc.enable()


def loaded_in_copies(routed: Routed, name: str, value: Tensor, tensor: ExpertTensor, interleaved: bool = False) -> None:
    """Experts 0 and 2 have a second place, 4 and 5."""
    spec = ExpertsSpec(E, 2, H, M, Gate("silu"), (tensor,), (0, 1, 2))
    ExpertLoader(spec, interleaved, routed, ((0, 4), (1,), (2, 5), (3,))).attach()
    parameter = routed.get_parameter(name)
    getattr(parameter, LOADER)(parameter, value, tensor)


def test_every_copy_of_an_expert_is_loaded() -> None:
    routed = Routed()
    loaded_in_copies(routed, "w13_weight", torch.cat((GATES, UPS), 1), BOTH)
    given = {(shard, place): part for _, shard, place, part in routed.given}
    assert set(given) == {(shard, place) for shard in ("w1", "w3") for place in range(6)}
    for place, expert in enumerate((0, 1, 2, 3, 0, 2)):
        assert torch.equal(given["w1", place], GATES[expert])
        assert torch.equal(given["w3", place], UPS[expert])


def test_every_copy_is_loaded_from_the_tensor_of_its_expert() -> None:
    routed = Routed()
    loaded_in_copies(routed, "w13_weight", UPS[2], ExpertTensor("2.up", ("up",), expert=2))
    assert [(shard, place) for _, shard, place, _ in routed.given] == [("w3", 2), ("w3", 5)]


def test_copies_on_a_rank_where_rows_alternate() -> None:
    routed = Routed(local=(3, 4, 5))
    bias = torch.randn(E, 2 * M)
    loaded_in_copies(routed, "w13_bias", bias, ExpertTensor("b", ("gate", "up"), bias=True), interleaved=True)
    for place, expert in enumerate((3, 0, 2)):
        assert torch.equal(routed.w13_bias[place, 0::2], bias[expert, :M])
        assert torch.equal(routed.w13_bias[place, 1::2], bias[expert, M:])
