"""Routing moves into the engine's runner where the block's router is one of its own, and elsewhere the plan names what prevents it."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any

import msgspec
import pytest
import torch
from moe_runner import ExpertsSpec, RouterForm, RouterSpec, Routing
from rich.console import Console
from tf_backend import capabilities
from tf_backend.cli._render import render_plan
from tf_backend.plan import Parallel
from tf_backend.plan.planner import make_plan
from tf_backend.plan.schema import Plan
from tf_tools.checkpoints import GROUPED
from torch import nn
from transformers import PreTrainedModel

Plans = Callable[..., Plan]
Models = Callable[..., PreTrainedModel]

MLP = "model.layers.0.mlp"


def layers_of(plan: Plan) -> dict[str, Any]:
    return {module.name: module.layers[0] for module in plan.modules if module.action == "replace"}


def why(plan: Plan) -> str:
    assert plan.is_served
    assert {entry.routing for entry in plan.experts} == {"outside"}
    assert not any(isinstance(layer, RouterSpec) for layer in layers_of(plan).values())
    (reason,) = {entry.why_outside for entry in plan.experts}
    return reason


def test_the_router_gives_logits_by_the_gate_of_the_engine(plan_of: Plans) -> None:
    plan = plan_of("mixtral")
    layers = layers_of(plan)
    assert layers[f"{MLP}.gate"] == RouterSpec("weight", 0, 3, float32=False, engine_gate=True)
    assert layers[f"{MLP}.experts"].routing == Routing(RouterForm("softmax", renormalised=True))
    assert {rule.source: rule.target for rule in plan.weights if ".gate." in rule.source} == {
        f"model.layers.{layer}.mlp.gate.weight": f"model.layers.{layer}.mlp.gate.engine_gate.weight"
        for layer in range(2)
    }
    assert Plan.from_json(plan.to_json()) == plan


def test_a_gate_that_others_read_keeps_its_weight(model_of: Models) -> None:
    model = model_of("mixtral")
    decoder_layer = model.get_submodule("model.layers.0")

    class Reads(type(decoder_layer)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            out: torch.Tensor = super().forward(*args, **kwargs) + self.mlp.gate.weight.mean()
            return out

    decoder_layer.__class__ = Reads
    plan = make_plan(model, Parallel(), capabilities.shipped()).plan
    kept, moved = (layers_of(plan)[f"model.layers.{layer}.mlp.gate"] for layer in range(2))
    assert (kept.engine_gate, moved.engine_gate) == (False, True)
    assert {rule.target for rule in plan.weights if ".gate." in rule.source} == {
        f"{MLP}.gate.weight", "model.layers.1.mlp.gate.engine_gate.weight",
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_and_a_correction(ranks: int, model_of: Models) -> None:
    model = model_of("deepseek_v3", **GROUPED)
    plan = make_plan(model, Parallel(tensor=ranks), capabilities.shipped()).plan
    form = RouterForm("sigmoid", True, 4, 2, "top2", renormalised=True, epsilon=1e-20, scaling=2.5)
    assert layers_of(plan)[f"{MLP}.experts"].routing == Routing(form, f"{MLP}.gate.e_score_correction_bias")
    assert layers_of(plan)[f"{MLP}.gate"] == RouterSpec("weight", 0, 3, float32=True, engine_gate=True)
    assert {rule.target for rule in plan.weights if rule.source.endswith("bias")} >= {
        f"{MLP}.gate.e_score_correction_bias"
    }


def test_a_correction_of_the_block_and_a_linear_of_the_router(plan_of: Plans) -> None:
    plan = plan_of(
        "afmoe", num_experts=8, num_experts_per_tok=3, num_dense_layers=0, moe_intermediate_size=64, head_dim=32
    )
    layers = layers_of(plan)
    assert layers[f"{MLP}.experts"].routing.correction == f"{MLP}.expert_bias"
    assert layers[f"{MLP}.router"].child == "gate"
    assert layers[f"{MLP}.router.gate"].out_features == 8
    assert f"{MLP}.router.gate.weight" in {rule.target for rule in plan.weights}


def test_inspect_shows_where_routing_is(plan_of: Plans) -> None:
    shown = Console(width=400, record=True, file=StringIO())
    for name in ("mixtral", "phimoe"):
        render_plan(shown, plan_of(name))
    text = shown.export_text()
    assert "inside: softmax renormalised" in text
    assert "outside: what its router gives is none of the forms that are known" in text


def test_a_limit_of_the_models_own_stays_with_kernels_that_take_it(model_of: Models) -> None:
    able = msgspec.structs.replace(capabilities.shipped(), moe_activations=("silu", "swigluoai_uninterleave"))
    assert "a limit of the model's own" in why(make_plan(model_of("gpt_oss"), Parallel(), able).plan)


def test_what_the_platform_lacks_stays_outside(model_of: Models) -> None:
    lacking = msgspec.structs.replace(capabilities.shipped(), moe_routers=("softmax",))
    assert why(make_plan(model_of("mixtral"), Parallel(), lacking).plan) == (
        "its router is softmax renormalised, and the engine's are softmax"
    )


def test_dealt_out_experts_need_kernels_that_look_at_the_map(model_of: Models) -> None:
    dealt = Parallel(tensor=2, experts=True)
    reason = why(make_plan(model_of("mixtral"), dealt, capabilities.shipped()).plan)
    assert "this platform's kernels are told the place of each expert" in reason
    able = msgspec.structs.replace(capabilities.shipped(), moe_maps_experts=True)
    plan = make_plan(model_of("mixtral"), dealt, able).plan
    assert {entry.routing for entry in plan.experts} == {"inside"}


def test_a_router_of_another_kind_stays_outside(plan_of: Plans) -> None:
    assert "none of the forms that are known" in why(plan_of("phimoe"))


def test_a_router_in_two_places_stays_outside(model_of: Models) -> None:
    model = model_of("mixtral")
    model.get_submodule("model.layers.1.mlp").gate = model.get_submodule(f"{MLP}.gate")
    plan = make_plan(model, Parallel(), capabilities.shipped()).plan
    assert {entry.why_outside for entry in plan.experts} == {"its router has several places in the model"}


def test_a_correction_that_no_checkpoint_holds_stays_outside(model_of: Models) -> None:
    model = model_of("deepseek_v3", **GROUPED)
    for layer in range(2):
        gate: Any = model.get_submodule(f"model.layers.{layer}.mlp.gate")
        gate.register_buffer("e_score_correction_bias", torch.zeros(8, device="meta"), persistent=False)
    plan = make_plan(model, Parallel(), capabilities.shipped()).plan
    assert {entry.why_outside for entry in plan.experts} == {
        "what it adds to its scores is no parameter or buffer that a checkpoint holds"
    }


class Doubled(nn.Module):
    """A block that changes what its router gives."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate, self.experts = block.gate, block.experts

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        _, weights, ids = self.gate(flat)
        out: torch.Tensor = self.experts(flat, ids, weights * 2)
        return out.view_as(hidden_states)


def test_weights_that_the_block_changes_stay_outside(model_of: Models) -> None:
    model = model_of("mixtral")
    for layer in range(2):
        decoder: Any = model.get_submodule(f"model.layers.{layer}")
        decoder.mlp = Doubled(decoder.mlp)
    assert "changes what its router gives" in why(make_plan(model, Parallel(), capabilities.shipped()).plan)


def test_rows_stay_outside_and_experts_say_so(plan_of: Plans) -> None:
    plan = plan_of("llama4_text", head_dim=32, intermediate_size_mlp=192, num_local_experts=4, num_experts_per_tok=2)
    assert "row by row" in why(plan)
    assert all(layer.routing is None for layer in layers_of(plan).values() if isinstance(layer, ExpertsSpec))
