"""Cosines and sines that hold each value twice: known of the very tensors that a module of positions made, by running it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tf_backend.plan.angles import AnglesMade
from tf_backend.plan.observe import observe
from vllm_layers_bridge.specs import Pairing


@pytest.mark.parametrize(
    ("name", "overrides", "pairing"),
    [("llama", {}, "halves"), ("gemma3_text", {"head_dim": 32}, "halves"), ("cohere", {"pad_token_id": 0}, "adjacent")],
)
def test_what_rotary_modules_make(name: str, overrides: dict[str, Any], pairing: Pairing, model_of: Any) -> None:
    model = model_of(name, **overrides)
    seen = observe(model)
    angles = AnglesMade(model, seen)
    assert seen.made
    other: Pairing = "adjacent" if pairing == "halves" else "halves"
    for made in seen.made:
        for tensor in made.tensors:
            assert angles.holds_twice(tensor, pairing)
            assert not angles.holds_twice(tensor, other)
            assert not angles.holds_twice(tensor.clone(), pairing), "another tensor, of which nothing is known"


def test_frequencies_of_each_half_alone(model_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        phases = position_ids[..., None].float() * self.inv_freq
        both = torch.cat((phases, 2 * phases), dim=-1)
        return both.cos(), both.sin()

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", forward)
    model = model_of("llama")
    seen = observe(model)
    angles = AnglesMade(model, seen)
    assert [angles.holds_twice(tensor, "halves") for tensor in seen.made[0].tensors] == [False, False]


def test_a_plan_without_that_knowledge_keeps_the_models_function(
    model_of: Any, planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnglesMade, "holds_twice", lambda *_: False)
    plan = planned(model_of("llama")).plan
    assert plan.is_served
    (variant,) = [variant for variant in plan.variants if variant.class_name == "LlamaAttention"]
    assert [fusion.name for fusion in variant.fusions] == ["qkv"]
    (miss,) = variant.misses
    assert (miss.fusion, "is not known to hold each value twice" in miss.reason) == ("rotary", True)
