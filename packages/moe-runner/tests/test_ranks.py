"""Tokens, ids and weights of data-parallel ranks meet the experts of all ranks, in whole or in parts, and come back."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from moe_runner import (
    ExpertsSpec,
    ExpertTensor,
    Gate,
    NotRunnable,
    RouterForm,
    Routing,
    SharedSpec,
    build_experts,
    build_shared,
)
from moe_runner._parts import _part_of_tokens
from moe_runner._ranks import copies_of, rank_arguments
from moe_runner.layer import RoutedExperts
from tf_tools.expert_weights import fill_experts
from tf_tools.ranks import on_ranks, stand_ins
from torch import Tensor, nn

E, H, M, K = 4, 64, 64, 2
TENSORS = (
    ExpertTensor("gate_up", ("gate", "up")),
    ExpertTensor("down", ("down",)),
    ExpertTensor("gate_up_bias", ("gate", "up"), bias=True),
    ExpertTensor("down_bias", ("down",), bias=True),
)
SPEC = ExpertsSpec(E, K, H, M, Gate("silu"), TENSORS, (0, 1, 2), runs_as="silu")
OF_REPLICA = (5, 3)
"""Tokens of each data-parallel rank."""


def numbers(*shape: int) -> Tensor:
    seed = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=seed) * 0.4


VALUES = {"gate_up": numbers(E, 2 * M, H), "down": numbers(E, H, M)}
VALUES |= {"gate_up_bias": numbers(E, 2 * M), "down_bias": numbers(E, H)}
X, LOGITS = numbers(sum(OF_REPLICA), H), numbers(sum(OF_REPLICA), E) * 3
WEIGHTS, IDS = LOGITS.softmax(-1).topk(K, dim=-1)


def expected(x: Tensor, ids: Tensor, weights: Tensor, bias: float = 1.0) -> Tensor:
    """What the experts give, from their formula."""
    out = torch.zeros_like(x)
    for token, place in ((t, k) for t in range(x.shape[0]) for k in range(ids.shape[1])):
        if (expert := int(ids[token, place])) >= E:
            continue
        gate, up = (VALUES["gate_up"][expert] @ x[token] + bias * VALUES["gate_up_bias"][expert]).chunk(2)
        inner = torch.nn.functional.silu(gate) * up
        out[token] += weights[token, place] * (VALUES["down"][expert] @ inner + bias * VALUES["down_bias"][expert])
    return out


BESIDE = numbers(H, H)


class Share(nn.Module):
    """What a linear that is split on its inputs gives on a rank."""

    def forward(self, x: Tensor) -> Tensor:
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        size = H // get_tensor_model_parallel_world_size()
        mine = slice(get_tensor_model_parallel_rank() * size, (get_tensor_model_parallel_rank() + 1) * size)
        return x[..., mine] @ BESIDE[:, mine].T


class Whole(nn.Module):
    """The same linear, whole on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ BESIDE.T


def loaded(spec: ExpertsSpec, prefix: str) -> RoutedExperts:
    block = nn.Module()
    block.share, block.whole = Share(), Whole()
    layer = build_experts(spec, prefix, shared=None if spec.shared is None else build_shared(spec.shared, block))
    fill_experts(layer, spec, VALUES)
    return layer


def whole(layer: RoutedExperts) -> None:
    """Leaves it as it is."""


def rows_of(x: Tensor, ids: Tensor) -> Tensor:
    """For each expert the rows of all tokens, zeros but where it is the token's first choice."""
    rows = torch.zeros(E, *x.shape)
    rows[ids[:, 0], torch.arange(len(x))] = x
    return rows


Case = tuple[ExpertsSpec, Tensor, Tensor, Callable[[RoutedExperts], None]]


def run(*cases: Case) -> list[Tensor]:
    """What layers of this rank give for the tokens of its replica; one layer for each case: spec, ids, weights, a fault."""
    from vllm.config import get_current_vllm_config
    from vllm.forward_context import set_forward_context

    config = get_current_vllm_config()
    replica = config.parallel_config.data_parallel_rank
    found = []
    with stand_ins():
        for index, (spec, all_ids, all_weights, spoil) in enumerate(cases):
            x, ids, weights = (tensor.split(OF_REPLICA)[replica] for tensor in (X, all_ids, all_weights))
            layer = loaded(spec, f"model.layers.{index}.mlp.experts")
            spoil(layer)
            across = torch.tensor(OF_REPLICA, dtype=torch.int32)
            with set_forward_context(None, config, num_tokens=x.shape[0], num_tokens_across_dp=across):
                found.append(layer(rows_of(x, ids)).sum(0) if spec.takes_rows else layer(x[None], ids, weights)[0])
    return found


def errors(found: list[list[Tensor]], *wanted: Tensor, tensor: int = 1) -> list[float]:
    """For each case the largest difference, as a part of the largest entry; the ranks of a replica must agree."""
    of_case = []
    for case, whole in zip(zip(*found, strict=True), wanted, strict=True):
        for rank, given in enumerate(case):
            assert torch.equal(given, case[rank - rank % tensor])
        assert [len(part) for part in case[::tensor]] == list(OF_REPLICA)
        of_case.append(float((torch.cat(case[::tensor]) - whole).abs().max() / whole.abs().max()))
    return of_case


@pytest.fixture(autouse=True)
def kernels_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_runner._ranks.kernels_map_experts", lambda: True)


ROW = msgspec.structs.replace(SPEC, arguments=(0,), top_k=1, tensors=TENSORS[:2])
INSIDE = msgspec.structs.replace(SPEC, routing=Routing(RouterForm("softmax")))
NULL = msgspec.structs.replace(SPEC, null="zero")
BEYOND = torch.where(torch.arange(8)[:, None] % 3 == 0, E + 1, IDS)


TOLD: Case = (SPEC, IDS, WEIGHTS, whole)
CASES: tuple[Case, ...] = (
    TOLD,
    (INSIDE, IDS, LOGITS, whole),
    (NULL, BEYOND, WEIGHTS, whole),
    (ROW, IDS, WEIGHTS, whole),
)


@pytest.mark.engine
@pytest.mark.parametrize("dealt_out", [True, False], ids=["whole experts", "parts of each"])
def test_tokens_of_every_rank_meet_every_expert(dealt_out: bool) -> None:
    found = on_ranks(run, *CASES, data=2, enable_expert_parallel=dealt_out)
    plain = expected(X, IDS, WEIGHTS)
    first = expected(X, IDS[:, :1], torch.ones(len(X), 1), bias=0.0)
    assert max(errors(found, plain, plain, expected(X, BEYOND, WEIGHTS), first)) < 1e-5


@pytest.mark.engine
def test_tensor_parallel_ranks_send_each_token_once() -> None:
    """Of 5 and 3 tokens, 3 and 2, 2 and 1 go out; the router of each rank sees those alone."""
    found = on_ranks(run, *CASES[:2], tensor=2, data=2, enable_expert_parallel=True)
    plain = expected(X, IDS, WEIGHTS)
    assert max(errors(found, plain, plain, tensor=2)) < 1e-5


SHARED = msgspec.structs.replace(SPEC, shared=SharedSpec("", "share", ndim=3))
WHOLE = msgspec.structs.replace(SPEC, shared=SharedSpec("", "whole", whole=True))


def counted_everywhere(layer: RoutedExperts) -> None:
    runner: Any = layer.runner
    for module in (layer.beside, getattr(runner._shared_experts, "_layer", None)):
        if module is not None:
            module.is_counted = True


@pytest.mark.engine
@pytest.mark.parametrize(("tensor", "dealt_out"), [(1, True), (1, False), (2, True)])
def test_shared_experts_are_added_once_for_each_token(tensor: int, dealt_out: bool) -> None:
    """Where tensor-parallel ranks send parts of the tokens, what each gives of a token's shared experts is of all of them still."""
    cases: list[Case] = [(spec, IDS, WEIGHTS, whole) for spec in (SHARED, WHOLE)]
    found = on_ranks(run, *cases, tensor=tensor, data=2, enable_expert_parallel=dealt_out)
    both = expected(X, IDS, WEIGHTS) + X @ BESIDE.T
    assert max(errors(found, both, both, tensor=tensor)) < 1e-5


@pytest.mark.engine
def test_shared_experts_that_every_rank_counts_would_be_seen() -> None:
    case: Case = (WHOLE, IDS, WEIGHTS, counted_everywhere)
    found = on_ranks(run, case, tensor=2, data=2, enable_expert_parallel=True)
    assert min(errors(found, expected(X, IDS, WEIGHTS) + X @ BESIDE.T, tensor=2)) > 1e-2


def as_if_for_this_rank_alone(layer: RoutedExperts) -> None:
    runner: Any = layer.runner
    layer.places = runner.routed_experts.expert_map


def with_the_map_of_the_other_rank(layer: RoutedExperts) -> None:
    runner: Any = layer.runner
    runner.routed_experts._expert_map = runner.routed_experts._expert_map.roll(E // 2)


@pytest.mark.engine
def test_ids_that_mean_other_places_would_be_seen() -> None:
    faults = (as_if_for_this_rank_alone, with_the_map_of_the_other_rank)
    cases: list[Case] = [(SPEC, IDS, WEIGHTS, fault) for fault in faults]
    found = on_ranks(run, *cases, data=2, enable_expert_parallel=True)
    assert min(errors(found, *[expected(X, IDS, WEIGHTS)] * 2)) > 1e-2


@pytest.mark.engine
def test_a_bias_that_every_rank_adds_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_runner._loading.ExpertLoader._is_not_first_of_split", lambda self: False)
    assert min(errors(on_ranks(run, TOLD, data=2), expected(X, IDS, WEIGHTS))) > 1e-2


@pytest.mark.parametrize(("tokens", "ranks"), [(5, 2), (6, 2), (1, 4), (7, 3)])
def test_parts_together_are_all_tokens(tokens: int, ranks: int) -> None:
    rows = torch.arange(tokens * 2.0).view(tokens, 2) + 1
    parts = [_part_of_tokens(rows, ranks, rank) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    assert torch.equal(torch.cat(parts)[:tokens], rows)
    assert not torch.cat(parts)[tokens:].any()


def test_copies_are_those_that_the_balancer_begins_with() -> None:
    assert copies_of(4, 0) == ((0,), (1,), (2,), (3,))
    assert copies_of(4, 2) == ((0, 4), (1, 5), (2,), (3,))
    assert copies_of(2, 3) == ((0, 2, 4), (1, 3))


def parallel(**options: Any) -> Any:
    plain = {
        "data_parallel_size": 1,
        "enable_eplb": False,
        "enable_expert_parallel": False,
        "use_sequence_parallel_moe": False,
        "eplb_config": SimpleNamespace(num_redundant_experts=0),
    }
    return SimpleNamespace(**plain | options)


ROWS = msgspec.structs.replace(SPEC, arguments=(0,))


@pytest.mark.parametrize(
    ("options", "spec", "maps", "said"),
    [
        ({"data_parallel_size": 2}, ROWS, True, "takes 2 rows of each token, and data-parallel ranks exchange"),
        ({"enable_eplb": True}, ROWS, True, "load of balanced experts is counted of as many rows as there are tokens"),
        ({"enable_eplb": True}, SPEC, False, "balanced over ranks"),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, SPEC, False, "exchange the ids"),
    ],
)
def test_what_would_go_astray_is_told(
    options: dict[str, Any], spec: ExpertsSpec, maps: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_runner._ranks.kernels_map_experts", lambda: maps)
    with pytest.raises(NotRunnable, match=said) as told:
        rank_arguments(parallel(**options), spec, "model.layers.3.mlp.experts")
    assert "model.layers.3.mlp.experts" in str(told.value)
    assert rank_arguments(parallel(), spec, "") == {
        "enable_eplb": False,
        "num_redundant_experts": 0,
        "is_sequence_parallel": False,
    }
