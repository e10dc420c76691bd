"""Every gated MLP, attention and norm of the common dense decoders is fused, each instance of it, and nothing is missed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tf_backend.plan.schema import Plan
from transformers import PreTrainedModel
from vllm_layers_bridge.specs import Angles, Pairing, RMSNormSpec, RotarySpec

COUNTS = {
    "llama": ("Llama", 4, {"rms_norm": 9}),
    "qwen2": ("Qwen2", 4, {"rms_norm": 9}),
    "qwen3": ("Qwen3", 4, {"rms_norm": 17}),
    "mistral": ("Mistral", 4, {"rms_norm": 9}),
    "smollm3": ("SmolLM3", 4, {"rms_norm": 9}),
    "granite": ("Granite", 4, {"rms_norm": 9}),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_four_layers(name: str, plan_of: Callable[..., Plan]) -> None:
    prefix, layers, norms = COUNTS[name]
    plan = plan_of(name, num_hidden_layers=layers)
    assert plan.refusals == ()
    found = {(count.cls, count.fusion): count.count for count in plan.summary()}
    assert found == {
        (f"{prefix}Attention", "qkv"): layers,
        (f"{prefix}Attention", "rotary"): 2 if name == "smollm3" else layers,
        (f"{prefix}MLP", "gated_mlp"): layers,
        (f"{prefix}RMSNorm", "rms_norm"): norms["rms_norm"],
    }
    assert [variant.misses for variant in plan.variants if variant.misses] == []


def test_gemma2_with_four_norms_a_layer_and_tanh_gelu(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of("gemma2")
    assert plan.refusals == ()
    assert {(count.cls, count.fusion, count.count) for count in plan.summary()} == {
        ("Gemma2Attention", "qkv", 2),
        ("Gemma2Attention", "rotary", 2),
        ("Gemma2MLP", "gated_mlp", 2),
        ("Gemma2RMSNorm", "rms_norm", 9),
    }
    specs = [call.spec for call in plan.attention]
    assert [spec.sliding_window for spec in specs] == [16, None]
    assert {spec.logits_soft_cap for spec in specs} == {8.0}
    assert {spec.scale for spec in specs} == {48**-0.5}


def test_every_norm_of_gemma4_spelled_as_a_power_and_the_weightless_ones_too(
    plan_of: Callable[..., Plan], model_of: Callable[..., PreTrainedModel]
) -> None:
    sizes = {"num_hidden_layers": 6, "hidden_size_per_layer_input": 32, "head_dim": 32, "rope_parameters": None}
    norms = [m for m in model_of("gemma4_text", **sizes).modules() if type(m).__name__ == "Gemma4RMSNorm"]
    plan = plan_of("gemma4_text", **sizes)
    assert plan.refusals == ()
    assert {c.cls: c.count for c in plan.summary() if c.fusion == "rms_norm"} == {"Gemma4RMSNorm": len(norms)}
    specs = [spec for module in plan.modules for spec in module.layers if isinstance(spec, RMSNormSpec)]
    assert sum(not spec.has_weight for spec in specs) == 6


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biased", "qwen2-sliding", "phi"])
def test_other_recipes_are_served(name: str, plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(name)
    assert plan.refusals == ()
    assert sum(count.count for count in plan.summary() if count.fusion == "qkv") == 2
    assert [variant.misses for variant in plan.variants if variant.misses] == []


def test_every_linear_and_the_embedding_have_an_engine_layer(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of("llama")
    actions = {module.name: module for module in plan.modules}
    assert actions["model.layers.0.self_attn.o_proj"].action == "replace"
    assert actions["model.layers.0.mlp.down_proj"].action == "replace"
    assert actions["model.embed_tokens"].action == "replace"
    assert actions["lm_head"].action == "replace"
    assert "model.layers.0.self_attn.q_proj" not in actions
    assert "model.layers.0.mlp.gate_proj" not in actions
    assert (plan.base, plan.layers) == ("model", "model.layers")


def test_weights_are_routed_into_merged_layers(plan_of: Callable[..., Plan]) -> None:
    rules = {rule.source: rule for rule in plan_of("llama").weights}
    prefix = "model.layers.1"
    query, value = rules[f"{prefix}.self_attn.q_proj.weight"], rules[f"{prefix}.self_attn.v_proj.weight"]
    assert (query.target, query.shard, query.shape) == (f"{prefix}.self_attn.qkv_proj.weight", "q", (128, 128))
    assert (value.target, value.shard, value.shape) == (f"{prefix}.self_attn.qkv_proj.weight", "v", (64, 128))
    up = rules[f"{prefix}.mlp.up_proj.weight"]
    assert (up.target, up.shard, up.shape) == (f"{prefix}.mlp.gate_up_proj.weight", 1, (192, 128))
    assert rules["model.norm.weight"].target == "model.norm.weight"
    assert rules["lm_head.weight"].target == "lm_head.weight"


def test_a_window_longer_than_the_longest_context_is_kept(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of("mistral", sliding_window=4096, max_position_embeddings=256)
    assert [call.spec.sliding_window for call in plan.attention] == [4096, 4096]


@pytest.mark.parametrize("name", ["phi3", "glm", "glm4"])
def test_gate_and_up_of_one_tensor_are_two_shards(name: str, plan_of: Callable[..., Plan]) -> None:
    overrides = {} if name == "phi3" else {"head_dim": 32, "pad_token_id": 0}
    plan = plan_of(name, **overrides)
    assert plan.refusals == ()
    assert sum(count.count for count in plan.summary() if count.fusion == "packed_gated_mlp") == 2
    weight = "model.layers.1.mlp.gate_up_proj.weight"
    rules = [rule for rule in plan.weights if rule.source == weight]
    assert [(rule.target, rule.shard, rule.rows) for rule in rules] == [(weight, 0, (0, 192)), (weight, 1, (192, 384))]
    assert {rule.shape for rule in rules} == {(384, 128)}


ROTARIES: dict[str, tuple[Pairing, Angles]] = {
    "llama": ("halves", "twice"),
    "phi3": ("halves", "twice"),
    "stablelm": ("halves", "twice"),
    "gpt_neox": ("halves", "twice"),
    "cohere": ("adjacent", "twice"),
    "glm4": ("adjacent", "first half"),
    "ernie4_5": ("adjacent", "first half"),
}


@pytest.mark.parametrize("name", ROTARIES)
def test_rotary_embeddings_are_calls_of_a_layer(name: str, plan_of: Callable[..., Plan]) -> None:
    overrides: dict[str, object] = {"pad_token_id": 0} if name in {"phi3", "cohere", "glm4"} else {}
    if name in {"glm4", "ernie4_5"}:
        overrides["head_dim"] = 32
    plan = plan_of(name, **overrides)
    assert plan.refusals == ()
    specs = [layer for module in plan.modules for layer in module.layers if isinstance(layer, RotarySpec)]
    assert specs == [RotarySpec("rotary", *ROTARIES[name], token_axis=2, in_place=True)] * 2
