"""Shared experts move into the engine's runner where their block's graph shows a plain sum; elsewhere the plan names what prevents it."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
import torch
from moe_runner import SharedSpec
from rich.console import Console
from tf_backend import capabilities
from tf_backend.cli._render import render_plan
from tf_backend.plan import Parallel
from tf_backend.plan.planner import make_plan
from tf_backend.plan.schema import Plan
from tf_tools.checkpoints import GROUPED
from torch.nn import functional as F
from transformers import PreTrainedModel

Plans = Callable[..., Plan]
Models = Callable[..., PreTrainedModel]

MLP = "model.layers.0.mlp"


def layers_of(plan: Plan) -> dict[str, Any]:
    return {module.name: module.layers[0] for module in plan.modules if module.action == "replace"}


def shared_of(plan: Plan) -> SharedSpec | None:
    spec: SharedSpec | None = layers_of(plan)[f"{MLP}.experts"].shared
    return spec


def forward_of(plan: Plan) -> str:
    (text,) = {v.rewritten for v in plan.variants if any(fusion.name == "shared_experts" for fusion in v.fusions)}
    assert text is not None
    return text


def test_a_sum_becomes_what_the_experts_give(plan_of: Plans) -> None:
    plan = plan_of("deepseek_v3", **GROUPED | {"n_group": 1, "topk_group": 1})
    assert plan.is_served
    assert shared_of(plan) == SharedSpec(MLP, "shared_experts", ndim=3)
    text = forward_of(plan)
    assert "hidden_states = hidden_states\n" in text
    assert "self.shared_experts" not in text
    assert {(entry.shared, entry.shared_runs, entry.why_shared_outside) for entry in plan.experts} == {
        ("shared_experts", "inside", "")
    }
    assert f"{MLP}.shared_experts.down_proj.weight" in {rule.target for rule in plan.weights}
    assert Plan.from_json(plan.to_json()) == plan


def test_a_gate_goes_with_them(plan_of: Plans) -> None:
    plan = plan_of("qwen2_moe")
    assert shared_of(plan) == SharedSpec(MLP, "shared_expert", "shared_expert_gate")
    text = forward_of(plan)
    assert "sigmoid" not in text
    assert "self.shared_expert" not in text
    assert layers_of(plan)[f"{MLP}.shared_expert_gate"].out_features == 1


@pytest.mark.parametrize(
    ("name", "overrides", "gives"),
    [
        ("ernie4_5_moe", {}, "final_hidden_states = final_hidden_states\n"),
        ("afmoe", {"num_dense_layers": 0, "head_dim": 32}, "return routed_output\n"),
        ("hunyuan_v1_moe", {"head_dim": 32, "num_experts": 4, "moe_topk": 2}, "return final_hidden_states\n"),
        ("cohere2_moe", {"num_shared_experts": 1}, "final_hidden_states = (final_hidden_states) / 2\n"),
        ("cohere2_moe", {"num_shared_experts": 1}, "shared_expert_output = None\n"),
    ],
)
def test_other_spellings(name: str, overrides: dict[str, Any], gives: str, plan_of: Plans) -> None:
    plan = plan_of(name, **overrides)
    assert {entry.shared_runs for entry in plan.experts} == {"inside"}, plan.experts[0].why_shared_outside
    assert gives in forward_of(plan)


def test_the_last_linear_leaves_the_sum_over_ranks_to_the_runner(model_of: Models) -> None:
    plan = make_plan(model_of("qwen2_moe"), Parallel(tensor=2), capabilities.shipped()).plan
    layers = layers_of(plan)
    assert (layers[f"{MLP}.shared_expert.down_proj"].style, layers[f"{MLP}.shared_expert.down_proj"].reduces) == (
        "row",
        False,
    )
    assert [name for name, layer in layers.items() if not getattr(layer, "reduces", True)] == [
        f"model.layers.{layer}.mlp.shared_expert.down_proj" for layer in range(2)
    ]
    assert layers[f"{MLP}.experts"].shared == SharedSpec(MLP, "shared_expert", "shared_expert_gate", whole=False)


def test_what_is_whole_on_every_rank_is_counted_on_one(model_of: Models) -> None:
    model = model_of("qwen2_moe", shared_expert_intermediate_size=63)
    plan = make_plan(model, Parallel(tensor=2), capabilities.shipped()).plan
    spec = shared_of(plan)
    assert spec is not None
    assert spec.whole
    assert layers_of(plan)[f"{MLP}.shared_expert.down_proj"].style == "replicated"


def rewritten(model: PreTrainedModel, forward: Callable[..., Any]) -> Plan:
    """The plan of the model with another forward in its blocks."""
    for layer in range(2):
        block = model.get_submodule(f"model.layers.{layer}.mlp")
        block.__class__ = type("Block", (type(block),), {"forward": forward, "__module__": __name__})
    return make_plan(model, Parallel(), capabilities.shipped()).plan


def in_place(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    flat = hidden_states.view(-1, hidden_states.shape[-1])
    _, weights, ids = self.gate(flat)
    out = self.experts(flat, ids, weights)
    out += F.sigmoid(self.shared_expert_gate(flat)) * self.shared_expert(flat)
    return out.view(hidden_states.shape)


def in_place_of_the_other(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    flat = hidden_states.view(-1, hidden_states.shape[-1])
    beside = self.shared_expert(flat)
    _, weights, ids = self.gate(flat)
    beside += self.experts(flat, ids, weights)
    return beside.view(hidden_states.shape)


def handed_on(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    flat = hidden_states.view(-1, hidden_states.shape[-1])
    beside = self.shared_expert(flat)
    other = beside
    _, weights, ids = self.gate(flat)
    return (other + self.experts(flat, ids, weights)).view(hidden_states.shape)


@pytest.mark.parametrize(
    ("forward", "gives", "gone"),
    [
        (in_place, "out = self.experts(flat, ids, weights)\n    return out.view", "sigmoid"),
        (in_place_of_the_other, "beside = self.experts(flat, ids, weights)\n", "self.shared_expert"),
        (handed_on, "beside = None\n    other = beside\n", "self.shared_expert"),
    ],
)
def test_sums_in_place_and_through_names(forward: Any, gives: str, gone: str, model_of: Models) -> None:
    plan = rewritten(model_of("qwen2_moe"), forward)
    assert {entry.shared_runs for entry in plan.experts} == {"inside"}, plan.experts[0].why_shared_outside
    text = forward_of(plan)
    assert gives in text
    assert gone not in text


def subtracted(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    flat = hidden_states.view(-1, hidden_states.shape[-1])
    _, weights, ids = self.gate(flat)
    return (self.experts(flat, ids, weights) - self.shared_expert(flat)).view(hidden_states.shape)


def used_twice(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    flat = hidden_states.view(-1, hidden_states.shape[-1])
    beside = self.shared_expert(flat)
    _, weights, ids = self.gate(flat)
    return ((self.experts(flat, ids, weights) + beside) * beside.sigmoid()).view(hidden_states.shape)


def of_a_size(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    flat = hidden_states.view(-1, hidden_states.shape[-1])
    _, weights, ids = self.gate(flat)
    out = self.experts(flat, ids, weights)
    if flat.shape[0] > 4:
        out = out + self.shared_expert(flat)
    return out.view(hidden_states.shape)


def spelled_as_a_call(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    flat = hidden_states.view(-1, hidden_states.shape[-1])
    _, weights, ids = self.gate(flat)
    return torch.add(self.experts(flat, ids, weights), self.shared_expert(flat)).view(hidden_states.shape)


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (subtracted, "`sub` (sub) is computed of what its experts give"),
        (used_twice, "used for something else than the sum too"),
        (of_a_size, "its forward may take another path than the one that was traced"),
        (spelled_as_a_call, "expected `a + b`"),
    ],
)
def test_another_sum_stays_in_the_block(forward: Any, why: str, model_of: Models) -> None:
    plan = rewritten(model_of("qwen2_moe"), forward)
    assert plan.is_served
    assert why in outside(plan)


def outside(plan: Plan) -> str:
    assert shared_of(plan) is None
    (reason,) = {entry.why_shared_outside for entry in plan.experts if entry.shared_runs == "outside"}
    return reason


def test_shared_experts_in_two_places_stay(model_of: Models) -> None:
    model: Any = model_of("qwen2_moe")
    model.model.layers[1].mlp.shared_expert = model.model.layers[0].mlp.shared_expert
    assert "has several places in the model" in outside(make_plan(model, Parallel(), capabilities.shipped()).plan)


def test_hooks_stay(model_of: Models) -> None:
    model: Any = model_of("qwen2_moe")
    for layer in model.model.layers:
        layer.mlp.shared_expert.register_forward_hook(lambda module, args, out: out * 2)
    assert "has hooks" in outside(make_plan(model, Parallel(), capabilities.shipped()).plan)


def test_other_fusions_alone_leave_them(model_of: Models) -> None:
    plan = make_plan(model_of("qwen2_moe"), Parallel(), capabilities.shipped(), fusions=()).plan
    assert outside(plan) == "the fusions that were chosen leave it out"


def test_inspect_shows_where_they_are(plan_of: Plans) -> None:
    shown = Console(width=400, record=True, file=StringIO())
    for plan in (plan_of("qwen2_moe"), plan_of("mixtral")):
        render_plan(shown, plan)
    lines = [line for line in shown.export_text().splitlines() if "SparseMoeBlock" in line and "experts as" in line]
    assert [line.rstrip().rsplit(" ", 1)[1] for line in lines] == ["inside", "none"]
