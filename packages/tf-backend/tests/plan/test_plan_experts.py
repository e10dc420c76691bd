"""Sparse blocks: their experts become layers of the engine's runner, their routers stay, and what the runner cannot compute is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from moe_runner import ExpertsSpec, ExpertTensor, Gate, WrittenExpertsSpec
from tf_backend import capabilities
from tf_backend.plan import Parallel
from tf_backend.plan.planner import Planned, make_plan
from tf_backend.plan.schema import ModulePlan, Plan
from torch import nn
from transformers import PreTrainedModel

Plans = Callable[..., Plan]
Models = Callable[..., PreTrainedModel]

PAIR = (ExpertTensor("gate_up_proj", ("gate", "up")), ExpertTensor("down_proj", ("down",)))
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1}

# Model type, overrides, experts, gate, shapes beside the hidden size, and modules whose fusions go on around the experts.
SERVED: dict[str, tuple[dict[str, Any], str, Gate, tuple[int, int, int], set[str]]] = {
    "mixtral": ({}, "model.layers.0.mlp.experts", Gate("silu"), (4, 2, 192), set()),
    "qwen2_moe": (
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
        "model.layers.0.mlp.experts",
        Gate("silu"),
        (8, 3, 64),
        {"Qwen2MoeMLP"},
    ),
    "glm4_moe": (
        {**ROUTED, "head_dim": 32, "n_shared_experts": 1},
        "model.layers.1.mlp.experts",
        Gate("silu"),
        (8, 2, 64),
        {"Glm4MoeMLP"},
    ),
    "dbrx": (
        {
            "d_model": 128,
            "n_heads": 4,
            "n_layers": 2,
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 128},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 500.0},
        },
        "transformer.blocks.0.ffn.experts",
        Gate("silu"),
        (4, 2, 64),
        set(),
    ),
    "gpt_oss": (
        {"swiglu_limit": 7.0},
        "model.layers.0.mlp.experts",
        Gate("swiglu_oai", limit=7.0, alpha=1.702),
        (4, 2, 192),
        set(),
    ),
}  # fmt: skip


ROUTING = {
    "mixtral": ("inside", "softmax renormalised"),
    "qwen2_moe": ("inside", "softmax"),
    "glm4_moe": ("inside", "sigmoid biased renormalised, sum + 1e-20"),
    "dbrx": ("outside", "makes ids and weights itself"),
    "gpt_oss": ("outside", "uses ids or weights for something else too"),
}


def experts_of(plan: Plan) -> dict[str, ExpertsSpec]:
    found = {module.name: layer for module in plan.modules for layer in module.layers if isinstance(layer, ExpertsSpec)}
    assert all(module.action == "replace" for module in plan.modules if module.name in found)
    return found


@pytest.mark.parametrize("name", SERVED)
def test_experts_go_into_the_runner_and_the_rest_is_fused(name: str, plan_of: Plans) -> None:
    overrides, module, gate, (experts, top_k, intermediate), fused = SERVED[name]
    plan = plan_of(name, **overrides)
    assert plan.refusals == ()
    spec = experts_of(plan)[module]
    assert spec.gate == gate
    assert (spec.num_experts, spec.top_k, spec.intermediate_size, spec.hidden_size) == (
        experts,
        top_k,
        intermediate,
        128,
    )
    assert spec.null is None
    assert [entry.experts for entry in plan.experts] == list(experts_of(plan))
    assert {entry.routing for entry in plan.experts} == {ROUTING[name][0]}
    assert all(ROUTING[name][1] in (entry.router or entry.why_outside) for entry in plan.experts)
    assert fused <= {count.cls for count in plan.summary()}


@pytest.mark.parametrize("name", SERVED)
def test_every_tensor_has_one_place_and_the_plan_is_json(name: str, plan_of: Plans, model_of: Models) -> None:
    overrides, module, *_ = SERVED[name]
    plan = plan_of(name, **overrides)
    state = {key: tuple(value.shape) for key, value in model_of(name, **overrides).state_dict().items()}
    assert {rule.source: rule.shape for rule in plan.weights}.items() <= state.items()
    held = [rule for rule in plan.weights if rule.source.startswith(f"{module}.")]
    assert all(rule.target.startswith(f"{module}.runner.routed_experts.w") for rule in held)
    spec = experts_of(plan)[module]
    assert {rule.source: rule.experts for rule in held} == {
        f"{module}.{tensor.name}": tensor for tensor in spec.tensors
    }
    assert Plan.from_json(plan.to_json()) == plan


def test_ids_of_experts_that_do_nothing_are_kept_from_the_runner(plan_of: Plans) -> None:
    latent = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
    plan = plan_of(
        "longcat_flash", num_layers=1, num_hidden_layers=2, ffn_hidden_size=192, expert_ffn_hidden_size=64, n_routed_experts=4,
        zero_expert_num=2, moe_topk=2, num_key_value_heads=4, head_dim=16, **latent,
    )  # fmt: skip
    (spec,) = experts_of(plan).values()
    assert (spec.num_experts, spec.null) == (4, "identity")
    assert {entry.why_outside for entry in plan.experts} == {"it chooses among 6 scores for 4 experts"}


def refusal(plan: Plan) -> str:
    assert not plan.is_served
    assert plan.refusals[0].place is not None
    return plan.refusals[0].reason


def written(plan: Plan) -> dict[str, str]:
    """Experts that run as they are written, and why."""
    assert plan.refusals == ()
    found = {m.name: layer.reason for m in plan.modules for layer in m.layers if isinstance(layer, WrittenExpertsSpec)}
    assert {entry.experts: entry.why_written for entry in plan.experts if entry.runs == "as written"} == found
    return found


def test_a_limit_that_the_kernel_would_leave_out_runs_as_it_is_written(plan_of: Plans, model_of: Models) -> None:
    plan = plan_of("gpt_oss")
    found = written(plan)
    assert set(found) == {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"}
    assert all(
        "swiglu_oai (limit 1.5, alpha 1.702), for which the engine has no kernel" in why for why in found.values()
    )
    held = {rule.source: rule.target for rule in plan.weights if ".experts." in rule.source}
    assert len(held) == 8
    assert held["model.layers.1.mlp.experts.down_proj_bias"] == "model.layers.1.mlp.experts.written.down_proj_bias"


def test_an_engine_that_takes_limits_runs_them(model_of: Models) -> None:
    able = msgspec.structs.replace(capabilities.shipped(), moe_activations=("silu", "swigluoai_uninterleave"))
    plan = make_plan(model_of("gpt_oss"), Parallel(), able).plan
    assert {spec.runs_as for spec in experts_of(plan).values()} == {"swigluoai_uninterleave"}


def test_where_graphs_are_captured_loops_over_data_are_refused(model_of: Models) -> None:
    cuda = msgspec.structs.replace(capabilities.shipped(), platform="cuda")
    assert "which a CUDA graph cannot" in refusal(make_plan(model_of("gpt_oss"), Parallel(), cuda).plan)


@pytest.mark.parametrize(
    ("name", "overrides", "ranks", "words"),
    [
        ("mixtral", {"hidden_size": 144, "head_dim": 32}, 1, "multiples of 32, and its is 144"),
        ("mixtral", {"intermediate_size": 99}, 2, "2 ranks do not divide the 99 features"),
        ("gpt_oss", {"swiglu_limit": 7.0, "intermediate_size": 96}, 2, "on a rank it has 48"),
    ],
)
def test_sizes_and_ranks_that_do_not_fit_run_as_they_are_written(
    name: str, overrides: dict[str, Any], ranks: int, words: str, model_of: Models, planned: Callable[..., Planned]
) -> None:
    found = written(planned(model_of(name, **overrides), parallel=Parallel(tensor=ranks)).plan)
    assert len(found) == 2
    assert all(words in why for why in found.values())


def test_experts_that_are_given_rows(plan_of: Plans) -> None:
    plan = plan_of("llama4_text", head_dim=32, intermediate_size_mlp=192, num_local_experts=4, num_experts_per_tok=2)
    assert plan.is_served
    found = experts_of(plan)
    assert set(found) == {f"model.layers.{layer}.feed_forward.experts" for layer in range(2)}
    assert all(spec.takes_rows and (spec.top_k, spec.gate) == (2, Gate("silu")) for spec in found.values())
    assert {entry.why_outside for entry in plan.experts} == {
        "the weights are laid on what goes into its experts, row by row"
    }


def test_rows_that_no_kernel_takes_stay_where_they_are(plan_of: Plans) -> None:
    options = {"head_dim": 32, "intermediate_size_mlp": 192, "num_local_experts": 4, "hidden_act": "relu"}
    plan = plan_of("llama4_text", **options)
    assert plan.is_served
    assert experts_of(plan) == {}
    assert {entry.runs for entry in plan.experts} == {"as written"}


def test_groups_of_experts(plan_of: Plans) -> None:
    options = {
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
    }
    heads = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4}
    plan = plan_of("deepseek_v2", **{**ROUTED, "n_shared_experts": 1}, **options, **heads)
    assert plan.is_served, plan.refusals
    assert {(spec.num_experts, spec.top_k) for spec in experts_of(plan).values()} == {(8, 2)}


def test_experts_that_are_dealt_out_need_not_be_split(model_of: Models, planned: Callable[..., Planned]) -> None:
    dealt = planned(model_of("mixtral", intermediate_size=99), parallel=Parallel(tensor=2, experts=True)).plan
    assert {spec.runs_as for spec in experts_of(dealt).values()} == {"silu"}
    few = planned(model_of("mixtral"), parallel=Parallel(tensor=8, experts=True)).plan
    assert all("its 4 experts cannot be dealt out over 8 ranks" in entry.why_written for entry in few.experts)


class Odd(nn.Module):
    """Experts that compute something else than any formula that is known."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = inner.gate_up_proj, inner.down_proj

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            token, place = torch.where(chosen == index)
            gate, up = (x[token] @ self.gate_up_proj[index].T).chunk(2, dim=-1)
            hidden = (gate.sigmoid() * up * 0.5) @ self.down_proj[index].T
            out.index_add_(0, token, hidden * weights[token, place, None])
        return out


class Single(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Listed(nn.Module):
    """A block in the form of models that bring their own code: router and a list of experts in one forward."""

    def __init__(self, width: int = 128, inner: int = 64, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList([Single(width, inner) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        return out.view_as(x)


class Averaging(Listed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(dim=1, keepdim=True))


def with_blocks(model: PreTrainedModel, kind: type[Listed]) -> PreTrainedModel:
    with torch.device("meta"):
        for layer in model.model.layers:
            layer.mlp = kind()
    return model


def test_a_block_with_a_list_of_experts_runs_whole_as_it_is_written(
    model_of: Models, planned: Callable[..., Planned]
) -> None:
    plan = planned(with_blocks(model_of("mixtral"), Listed)).plan
    found = written(plan)
    assert set(found) == {"model.layers.0.mlp", "model.layers.1.mlp"}
    assert all("its experts are a list of modules" in why for why in found.values())
    held = {rule.source: rule.target for rule in plan.weights if ".mlp." in rule.source}
    assert held["model.layers.1.mlp.experts.3.w2.weight"] == "model.layers.1.mlp.written.experts.3.w2.weight"
    assert held["model.layers.0.mlp.gate.weight"] == "model.layers.0.mlp.written.gate.weight"


def test_a_block_with_a_list_of_experts_is_refused_where_it_is_not_known_to_be_right(model_of: Models) -> None:
    cuda = msgspec.structs.replace(capabilities.shipped(), platform="cuda")
    model = with_blocks(model_of("mixtral"), Listed)
    assert "which a CUDA graph cannot" in refusal(make_plan(model, Parallel(), cuda).plan)
    mixing = make_plan(with_blocks(model_of("mixtral"), Averaging), Parallel(), capabilities.shipped()).plan
    assert "is not seen to treat each token alone" in refusal(mixing)


class Mixing(Odd):
    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(dim=0), chosen, weights)


def with_experts(model: PreTrainedModel, kind: type[Odd]) -> PreTrainedModel:
    for layer in model.model.layers:
        layer.mlp.experts = kind(layer.mlp.experts)
    return model


def test_experts_that_cannot_be_read_run_as_they_are_written(model_of: Models, planned: Callable[..., Planned]) -> None:
    found = written(planned(with_experts(model_of("mixtral"), Odd)).plan)
    assert all("`Odd` cannot be read: none of the formulas" in why for why in found.values())


def test_experts_that_mix_tokens_are_refused(model_of: Models, planned: Callable[..., Planned]) -> None:
    reason = refusal(planned(with_experts(model_of("mixtral"), Mixing)).plan)
    assert "what it gives for one token depends on other tokens" in reason


def test_layers_may_differ(model_of: Models, planned: Callable[..., Planned]) -> None:
    """What is read of one instance is not taken for what another computes."""
    model = model_of("gpt_oss", swiglu_limit=7.0)
    model.model.layers[1].mlp.experts.limit = 3.0
    plan = planned(model).plan
    assert list(written(plan)) == ["model.layers.1.mlp.experts"]
    assert list(experts_of(plan)) == ["model.layers.0.mlp.experts"]


def test_module_plans_are_for_whole_modules(plan_of: Plans) -> None:
    plan = plan_of("mixtral")
    (experts,) = [module for module in plan.modules if module.name == "model.layers.1.mlp.experts"]
    assert experts == ModulePlan(experts.name, "replace", None, experts.layers)
    assert experts.layers[0].tensors == PAIR
