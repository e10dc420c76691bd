"""vLLM's own balancer moves experts between two ranks, and the model gives what it gave before."""

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
    RoutedExperts,
    RouterForm,
    Routing,
    build_experts,
)
from tf_backend import capabilities
from tf_backend.errors import OptionRefused
from tf_backend.model.balance import BalancedExperts
from tf_backend.model.skeleton import skeleton
from tf_backend.plan.planner import Planned, make_plan
from tf_backend.plan.schema import Parallel
from tf_tools.checkpoints import build_model
from tf_tools.expert_weights import fill_experts
from tf_tools.ranks import on_ranks, stand_ins
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

pytestmark = pytest.mark.engine

E, H, M, K, T, REDUNDANT = 4, 64, 64, 2, 12, 2
STACKED = (
    ExpertTensor("gate_up", ("gate", "up"), interleaved=True),
    ExpertTensor("down", ("down",), transposed=True),
    ExpertTensor("gate_up_bias", ("gate", "up"), bias=True, interleaved=True),
    ExpertTensor("down_bias", ("down",), bias=True),
)
ONE_BY_ONE = tuple(ExpertTensor(f"{e}.{half}", (half,), expert=e) for e in range(E) for half in ("gate", "up", "down"))
ONE = ExpertsSpec(E, K, H, M, Gate("silu"), ONE_BY_ONE, (0, 1, 2), runs_as="silu")
SPECS = {
    "stacked, with biases, rows that alternate": ExpertsSpec(
        E, K, H, M, Gate("swiglu_oai", limit=7.0, alpha=1.702), STACKED, (0, 1, 2), runs_as="swigluoai"
    ),
    "one by one": ONE,
    "one by one, chosen inside": msgspec.structs.replace(ONE, routing=Routing(RouterForm("softmax"))),
}


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.4


X = numbers(7, T, H)
IDS = torch.tensor(
    [[3, token % 3] for token in range(T)]
)  # the last expert, which has no copy at first, gets half of all
LOGITS = torch.full((T, E), -2.0).scatter(1, IDS, numbers(8, T, K) + 1.0)
SHARES = LOGITS.softmax(-1).gather(1, IDS)


class Model(BalancedExperts, nn.Module):
    """Two layers of experts, told which tokens they get."""

    def __init__(self, spec: ExpertsSpec) -> None:
        super().__init__()
        self.layers = nn.ModuleList(build_experts(spec, f"model.layers.{index}.experts") for index in range(2))
        self.count_experts(self)

    def load(self) -> None:
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, RoutedExperts)
            for parameter in layer.parameters():
                parameter.data.fill_(float("nan"))
            fill_experts(layer, layer.spec, checkpoint(index))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, RoutedExperts)
            x = x + layer(x, IDS, SHARES if layer.spec.routing is None else LOGITS)
        return x


def checkpoint(layer: int) -> dict[str, Tensor]:
    """The same experts in both forms of the checkpoint."""
    gate_up, down = numbers(layer, E, 2 * M, H), numbers(layer + 10, E, M, H)
    stored = {"gate_up": gate_up, "down": down}
    stored |= {"gate_up_bias": numbers(layer + 20, E, 2 * M), "down_bias": numbers(layer + 30, E, H)}
    for e in range(E):
        stored |= {f"{e}.gate": gate_up[e, 0::2], f"{e}.up": gate_up[e, 1::2], f"{e}.down": down[e].T}
    return stored


def expected(spec: ExpertsSpec) -> Tensor:
    x = X
    for layer in range(2):
        stored, out = checkpoint(layer), torch.zeros_like(x)
        for token in range(T):
            for expert, share in zip(IDS[token].tolist(), SHARES[token], strict=True):
                inner = stored["gate_up"][expert] @ x[token]
                if spec.has_bias:
                    inner = inner + stored["gate_up_bias"][expert]
                gate, up = inner[0::2], inner[1::2]
                if spec.has_bias:
                    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                    inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
                else:
                    inner = nn.functional.silu(gate) * up
                out[token] += share * (inner @ stored["down"][expert])
                if spec.has_bias:
                    out[token] += share * stored["down_bias"][expert]
        x = x + out
    return x


def balanced(name: str, spoil: Callable[[Model], None] | None = None) -> dict[str, Any]:
    """Run, let vLLM's balancer rearrange, run again."""
    from vllm.config import get_current_vllm_config
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.models.interfaces import is_mixture_of_experts  # noqa: TID251 - what vLLM asks of a model

    config = get_current_vllm_config()
    config.parallel_config.eplb_config.window_size = config.parallel_config.eplb_config.step_interval = 4
    model_config: Any = SimpleNamespace(model="model", compute_hash=lambda: "model")
    with stand_ins(), set_forward_context(None, config):
        model = Model(SPECS[name])
        model.load()
        state = EplbState(config.parallel_config, torch.device("cpu"))
        state.add_model(model, model_config)  # type: ignore[arg-type]
        known = state.model_states["model"]
        found: dict[str, Any] = {"is_moe": is_mixture_of_experts(model), "held": known.physical_to_logical_map.tolist()}
        assert known.num_unpadded_tokens_tensors is not None
        known.num_unpadded_tokens_tensors[0].fill_(T - 2)
        found["before"] = model(X)
        found["load"] = known.expert_load_pass.clone()
        state.step()
        if spoil is not None:
            spoil(model)
        found |= {"after": model(X), "holds": known.physical_to_logical_map.tolist()}
        found["weights"] = [[weight.clone() for weight in layer] for layer in model.expert_weights]
        return found


def on_two(name: str, spoil: Callable[[Model], None] | None = None) -> list[dict[str, Any]]:
    return on_ranks(balanced, name, spoil, tensor=2, redundant=REDUNDANT, enable_expert_parallel=True, enable_eplb=True)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.fixture(autouse=True)
def kernels_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_runner._ranks.kernels_map_experts", lambda: True)


@pytest.mark.parametrize("name", SPECS)
def test_experts_move_and_nothing_changes(name: str) -> None:
    ranks = on_two(name)
    wanted, local = expected(SPECS[name]), (E + REDUNDANT) // 2
    for found in ranks:
        assert found["is_moe"]
        assert error(found["before"], wanted) < 1e-5
        assert error(found["after"], wanted) < 1e-5
        assert found["held"] == [[0, 1, 2, 3, 0, 1]] * 2
        assert found["holds"] == ranks[0]["holds"]
        assert all(row.count(3) > 1 for row in found["holds"])
        # Rows beyond the real tokens are not counted; copies take turns.
        assert found["load"].sum(dim=-1).tolist() == [(T - 2) * K] * 2
        assert found["load"][0].tolist() == [2, 1, 3, 10, 2, 2]
    of_expert: dict[tuple[int, int, int], Tensor] = {}
    for layer, row in enumerate(ranks[0]["holds"]):
        for physical, expert in enumerate(row):
            for index, weight in enumerate(ranks[physical // local]["weights"][layer]):
                one = weight[physical % local]
                assert torch.equal(one, of_expert.setdefault((layer, expert, index), one)), "a copy differs"
    assert len(of_expert) == 2 * E * len(ranks[0]["weights"][0])


def test_a_copy_that_is_not_loaded_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_runner.layer.copies_of", lambda experts, redundant: [(e,) for e in range(experts)])
    for found in on_two("one by one"):
        assert found["before"].isnan().any()


def forget_where_they_went(model: Model) -> None:
    for runner in model.moe_layers:
        runner.eplb_state.logical_to_physical_map[:, 0] = torch.arange(E)
        runner.eplb_state.logical_replica_count.fill_(1)


def leave_one_weight_behind(model: Model) -> None:
    weight = model.expert_weights[1][-1]
    weight.copy_(weight.roll(1, 0))


@pytest.mark.parametrize("spoil", [forget_where_they_went, leave_one_weight_behind])
def test_experts_that_are_not_where_they_are_looked_for_would_be_seen(spoil: Callable[[Model], None]) -> None:
    name = "stacked, with biases, rows that alternate"
    assert error(on_two(name, spoil)[0]["after"], expected(SPECS[name])) > 1e-3


class Served(BalancedExperts, nn.Module):
    """The part of a served model that the balancer sees."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.count_experts(model)


ABLE = msgspec.structs.replace(capabilities.shipped(), moe_maps_experts=True)
TOKENS = torch.randint(3, 380, (16,), generator=torch.Generator().manual_seed(0))


def of_a_whole_model(
    build: Callable[..., None], reference: PreTrainedModel, served: PreTrainedModel, planned: Planned
) -> dict[str, Any]:
    from vllm.config import get_current_vllm_config
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.forward_context import set_forward_context

    config = get_current_vllm_config()
    config.parallel_config.eplb_config.window_size = config.parallel_config.eplb_config.step_interval = 4
    with stand_ins(), set_forward_context(None, config):
        build(reference, served, planned)
        base = served.get_submodule(planned.plan.base)
        state = EplbState(config.parallel_config, torch.device("cpu"))
        state.add_model(Served(served), SimpleNamespace(model="", compute_hash=lambda: ""))  # type: ignore[arg-type]
        known = state.model_states[""]
        assert known.num_unpadded_tokens_tensors is not None
        known.num_unpadded_tokens_tensors[0].fill_(len(TOKENS))
        found: dict[str, Any] = {"before": last_hidden_state(base)}
        held = known.physical_to_logical_map.clone()
        state.step()
        found["moved"] = int((known.physical_to_logical_map != held).sum())
        return {**found, "after": last_hidden_state(base)}


def last_hidden_state(base: Any) -> Tensor:
    with torch.no_grad():
        output = base(input_ids=TOKENS[None], position_ids=torch.arange(len(TOKENS))[None], use_cache=False)
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


@pytest.mark.parametrize(
    ("name", "overrides", "routing"),
    [
        ("gpt_oss", {"swiglu_limit": 7.0}, "outside"),
        (
            "qwen3_moe",
            {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "head_dim": 32},
            "inside",
        ),
    ],
)
def test_whole_models_with_experts_that_move_give_what_transformers_gives(
    name: str, overrides: dict[str, Any], routing: str, build_on_rank: Callable[..., Any]
) -> None:
    reference = build_model(name, overrides=overrides or None)
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[reference.config.model_type]
    reference.config.architectures = [architecture]
    reference.config._attn_implementation = "eager"
    wanted = last_hidden_state(reference.base_model)
    served = skeleton(reference.config)
    planned = make_plan(served, Parallel(tensor=2, experts=True, redundant=REDUNDANT), ABLE)
    assert {entry.routing for entry in planned.plan.experts} == {routing}
    options = {"enable_expert_parallel": True, "enable_eplb": True}
    for found in on_ranks(
        of_a_whole_model, build_on_rank, reference, served, planned, tensor=2, redundant=REDUNDANT, **options
    ):
        assert error(found["before"], wanted) < 1e-5
        assert found["moved"] > 0
        assert error(found["after"], wanted) < 1e-5


def counted(name: str) -> dict[str, Any]:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts as Routed
    from vllm.model_executor.models.interfaces import is_mixture_of_experts  # noqa: TID251 - what vLLM asks of a model

    with stand_ins():
        model = Model(SPECS[name])
        model.load()
    names = (
        *("num_moe_layers", "num_logical_experts", "num_physical_experts", "num_local_physical_experts"),
        *("num_redundant_experts", "num_routed_experts", "num_shared_experts", "num_expert_groups"),
    )
    found: dict[str, Any] = {field: getattr(model, field) for field in names}
    found |= {"is_moe": is_mixture_of_experts(model), "dense is": is_mixture_of_experts(Served(nn.Linear(2, 2)))}
    weights = Routed.get_expert_weights
    Routed.get_expert_weights = lambda self: list(weights(self))[:2]  # type: ignore[method-assign]
    stage = Served(nn.ModuleList([nn.Identity(), model.layers[1]]))  # of a pipeline, without the first layer
    found["of a stage"] = [runner.layer_name for runner in stage.moe_layers], stage.num_moe_layers
    model.update_physical_experts_metadata(E + REDUNDANT, 3)
    nothing = torch.zeros(0)
    try:
        model.set_eplb_state(nothing, nothing, nothing)
    except OptionRefused as refused:
        found["refused"] = str(refused)
    try:
        model.update_physical_experts_metadata(8, 4)
    except ValueError as refused:
        found["resized"] = str(refused)
    return found


def test_what_is_counted_and_what_would_stay_behind() -> None:
    name = "stacked, with biases, rows that alternate"
    options = {"enable_expert_parallel": True, "enable_eplb": True}
    found, _ = on_ranks(counted, name, tensor=2, redundant=REDUNDANT, **options)
    assert found.pop("is_moe")
    assert not found.pop("dense is")
    assert "`w2_bias`" in (refused := found.pop("refused"))
    assert "model.layers.0.experts" in refused
    assert found.pop("of a stage") == (["model.layers.1.experts"], 1)
    assert "room for 3 experts" in found.pop("resized")
    assert found == {
        "num_moe_layers": 2,
        "num_logical_experts": E,
        "num_physical_experts": E + REDUNDANT,
        "num_local_physical_experts": 3,
        "num_redundant_experts": REDUNDANT,
        "num_routed_experts": E,
        "num_shared_experts": 0,
        "num_expert_groups": 1,
    }
