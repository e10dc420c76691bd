"""Rotary embeddings whose frequencies follow the length of the sequence are planned as tables of positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tf_backend.capabilities import Capabilities
from tf_backend.plan import Parallel
from tf_backend.plan.counted import counting_modules
from tf_backend.plan.planner import make_plan
from tf_backend.plan.positions import position_notes, position_refusals, reaches
from tf_backend.plan.schema import Plan
from torch import nn
from transformers import PreTrainedModel
from vllm_layers_bridge.specs import PositionTableSpec

Plans = Callable[..., Plan]
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [3.0] * 16,
    "original_max_position_embeddings": 128,
    "factor": 2.0,
}


LLAMA4 = {"head_dim": 32, "intermediate_size_mlp": 192, "num_local_experts": 4}


def tables(plan: Plan) -> dict[str, PositionTableSpec]:
    return {m.name: s for m in plan.modules for s in m.layers if isinstance(s, PositionTableSpec)}


def test_frequencies_that_grow_with_the_length(plan_of: Plans) -> None:
    plan = plan_of("llama", rope_parameters=DYNAMIC)
    assert plan.is_served
    assert tables(plan) == {"model.rotary_emb": PositionTableSpec("", 1, 256, "each its own")}
    assert not any(name.startswith("model.rotary_emb") for name in plan.buffers)
    assert list(position_refusals(plan, 1024)) == []
    assert list(position_notes(plan, 256)) == []
    (note,) = position_notes(plan, 257)
    assert note == str(next(reaches(plan)))
    assert "`model.rotary_emb` changes its frequencies with the length of a sequence from 256 tokens on" in note
    assert "a longer prompt that it is given at once it rotates otherwise" in note
    assert "--max-model-len 256" in note


def test_two_sets_of_frequencies_are_served_up_to_the_first_of_them(plan_of: Plans) -> None:
    plan = plan_of("llama", rope_parameters=LONG)
    assert plan.is_served
    assert tables(plan) == {"model.rotary_emb": PositionTableSpec("", 1, 128, "another")}
    assert list(position_refusals(plan, 128)) == []
    (refusal,) = position_refusals(plan, 129)
    assert "--max-model-len 128" in refusal.remedy
    assert refusal.module == "model.rotary_emb"
    assert list(position_notes(plan, 129)) == []
    assert str(next(reaches(plan))).startswith(
        "served for sequences of up to 128 tokens: `model.rotary_emb` has one set of"
    )


def test_a_longest_position_that_nothing_is_made_of(plan_of: Plans) -> None:
    plan = plan_of("phimoe", num_local_experts=4, num_experts_per_tok=2)
    assert plan.is_served
    assert {name: spec.beyond for name, spec in tables(plan).items()} == {"model.rotary_emb": "same"}


def test_chunks_of_attention_are_served_up_to_the_end_of_the_first(plan_of: Plans) -> None:
    layers = ["chunked_attention", "full_attention"]
    plan = plan_of("llama4_text", **LLAMA4, moe_layers=[], layer_types=layers, attention_chunk_size=64)
    assert plan.is_served
    assert [attention.chunk for attention in plan.attention] == [64, None]
    assert list(position_refusals(plan, 64)) == []
    (refusal,) = position_refusals(plan, 65)
    assert "within chunks of 64 tokens" in refusal.reason
    assert "--max-model-len 64" in refusal.remedy


def test_a_count_of_tokens_is_taken_from_the_engine(plan_of: Plans) -> None:
    layers = ["chunked_attention", "full_attention"]
    options = {**LLAMA4, "moe_layers": [], "layer_types": layers, "no_rope_layers": [1, 0], "floor_scale": 4}
    plan = plan_of("llama4_text", **options)
    assert counting_modules(plan.modules, plan.variants) == {"model.layers.1.self_attn"}
    assert plan.is_served


def test_a_count_that_is_not_rewritten_mixes_tokens(
    model_of: Callable[..., PreTrainedModel], platform: Capabilities
) -> None:
    options = {**LLAMA4, "moe_layers": [], "no_rope_layers": [0, 0]}
    plan = make_plan(model_of("llama4_text", **options), Parallel(), platform, fusions=()).plan
    assert any("`arange`" in refusal.reason for refusal in plan.refusals)


def test_plain_frequencies_are_computed_as_the_model_does(plan_of: Plans) -> None:
    assert tables(plan_of("llama")) == {}


class Peeking(nn.Module):
    """Looks at its longest position, and at what the tokens hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inv_freq = nn.Buffer(torch.ones(16), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if position_ids.max() > 100:
            self.inv_freq = self.inv_freq * 2
        angle = position_ids[..., None] * self.inv_freq.repeat(2) + x.mean()
        return angle.cos(), angle.sin()


def test_a_module_that_reads_the_tokens_as_well_is_refused(
    model_of: Callable[..., PreTrainedModel], platform: Capabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = model_of("llama")
    with torch.device("meta"):
        model.model.rotary_emb = Peeking()
    monkeypatch.setattr(
        type(model),
        "_init_weights",
        lambda self, module: module.inv_freq.fill_(1.0) if hasattr(module, "inv_freq") else None,
    )
    plan = make_plan(model, Parallel(), platform).plan
    assert [refusal.module for refusal in plan.refusals] == ["model.rotary_emb"]
    assert "token axis" in plan.refusals[0].reason
