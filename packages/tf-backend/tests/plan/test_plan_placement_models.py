"""Placement of whole models over tensor-parallel ranks: what is split, what stays whole, and what is refused."""

from __future__ import annotations

import pytest
from tf_backend import capabilities
from tf_backend.model.skeleton import skeleton
from tf_backend.plan import Parallel, Plan, plan
from tf_backend.plan.planner import make_plan
from tf_tools.checkpoints import GROUPED, build_model
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm_layers_bridge.specs import LayerSpec, LinearSpec, MergedLinearSpec, QKVLinearSpec, RMSNormSpec


def planned_config(name: str, **overrides: object) -> PreTrainedConfig:
    config = build_model(name, overrides=overrides or None).config
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return config


def planned(name: str, ranks: int, **overrides: object) -> Plan:
    return plan(skeleton(planned_config(name, **overrides)), Parallel(tensor=ranks))


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "mistral", "smollm3", "gemma2", "granite", "phi", "phi3", "glm4", "gpt2"]
)
def test_attention_and_mlp_are_split(name: str) -> None:
    found = planned(name, 2)
    assert found.is_served, [str(refusal) for refusal in found.refusals]
    assert {record.placement for record in found.placement} == {"split"}
    styles = [
        layer.style
        for module in found.modules
        for layer in module.layers
        if isinstance(layer, LinearSpec | MergedLinearSpec)
    ]
    assert "replicated" not in styles
    assert "row" in styles


@pytest.mark.parametrize("shared", [1, 2])
def test_mlps_of_one_class_and_several_widths_are_each_split(shared: int) -> None:
    found = planned("deepseek_v3", 2, **GROUPED | {"first_k_dense_replace": 1, "n_shared_experts": shared})
    mlps = [record for record in found.placement if record.cls == "DeepseekV3MLP"]
    assert [(record.placement, record.count) for record in mlps] == [("split", 2)]
    widths = {
        (source.size, layer.style)
        for m in found.modules
        for layer in m.layers
        if isinstance(layer, MergedLinearSpec)
        for source in layer.sources
    }
    assert widths == {(192, "column"), (64 * shared, "column")}


def test_key_value_heads_fewer_than_ranks_are_repeated() -> None:
    found = planned("llama", 4, num_key_value_heads=2)
    assert found.is_served
    assert any(
        isinstance(layer, QKVLinearSpec) and layer.num_kv_heads == 2 for m in found.modules for layer in m.layers
    )


def test_a_single_key_value_head_is_repeated() -> None:
    assert planned("llama-biased", 2, num_key_value_heads=1).is_served


def test_heads_that_ranks_do_not_divide_are_refused() -> None:
    found = planned("llama", 3)
    (refusal,) = found.refusals
    assert refusal.reason == (
        "`LlamaAttention` cannot be split over 3 ranks: it has 4 heads of queries and 2 of keys and values"
    )
    assert refusal.remedy == "Set `--tensor-parallel-size` to 1, 2 or 4."


def layers_of(found: Plan, kind: type[LayerSpec]) -> dict[str, LayerSpec]:
    return {m.name: layer for m in found.modules for layer in m.layers if isinstance(layer, kind)}


@pytest.mark.parametrize(("ranks", "kv_heads", "pieces"), [(2, 2, (2, 2)), (4, 2, (4, 2)), (2, 1, (2, 1))])
def test_norms_over_all_heads_take_their_mean_over_ranks(ranks: int, kv_heads: int, pieces: tuple[int, int]) -> None:
    found = planned("olmo2", ranks, num_key_value_heads=kv_heads)
    assert found.is_served, [str(refusal) for refusal in found.refusals]
    norms = layers_of(found, RMSNormSpec)
    query, key = (norms[f"model.layers.0.self_attn.{name}"] for name in ("q_norm", "k_norm"))
    assert isinstance(query, RMSNormSpec)
    assert isinstance(key, RMSNormSpec)
    assert (query.pieces, key.pieces) == pieces
    assert (query.hidden_size, key.hidden_size) == (128, 32 * kv_heads)
    others = [layer for name, layer in norms.items() if "self_attn" not in name]
    assert {layer.pieces for layer in others if isinstance(layer, RMSNormSpec)} == {1}


def test_one_rank_has_no_placement() -> None:
    assert planned("llama", 1).placement == ()


def test_attention_that_cannot_be_split_is_refused() -> None:
    (refusal,) = planned("diffllama", 2).refusals
    assert "`DiffLlamaAttention` cannot be split over 2 ranks: `chunk`" in refusal.reason
    assert not refusal.reason.endswith(".")
    assert refusal.remedy == "Set `--tensor-parallel-size` to 1."


def test_a_packed_weight_is_split_through_a_clamp() -> None:
    sizes: dict[str, object] = {"d_model": 128, "n_heads": 4, "n_layers": 2}
    attention = {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 500.0}
    experts = {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 128}
    found = planned("dbrx", 2, attn_config=attention, ffn_config=experts, **sizes)
    assert found.is_served, [str(refusal) for refusal in found.refusals]
    (record,) = [record for record in found.placement if record.cls == "DbrxAttention"]
    assert (record.placement, record.count) == ("split", 2)
    assert "transformer.blocks.1.norm_attn_norm.attn" in layers_of(found, QKVLinearSpec)


def test_low_rank_projections_stay_whole() -> None:
    latent = {"kv_lora_rank": 64, "q_lora_rank": 48, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    found = planned("minicpm3", 2, num_key_value_heads=4, **latent)
    assert found.is_served, [str(refusal) for refusal in found.refusals]
    linears = layers_of(found, LinearSpec)
    styles = {
        name: linears[f"model.layers.1.self_attn.{name}"]
        for name in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj")
    }
    found_styles = {name: layer.style for name, layer in styles.items() if isinstance(layer, LinearSpec)}
    assert found_styles == {
        "q_a_proj": "replicated",
        "kv_a_proj_with_mqa": "replicated",
        "q_b_proj": "column",
        "o_proj": "row",
    }
    (record,) = [record for record in found.placement if record.cls == "MiniCPM3Attention"]
    assert record.replicated_parameters == 2 * 128 * (48 + 64 + 32)
    assert record.notes == ("`kv_a_proj_with_mqa`, `q_a_proj`: whole on every rank",)


def test_a_weight_for_each_head_is_split_with_the_heads() -> None:
    found = planned("cohere", 2, use_qk_norm=True, pad_token_id=0)
    assert found.is_served, [str(refusal) for refusal in found.refusals]
    (attention,) = [module for module in found.modules if module.name == "model.layers.0.self_attn"]
    assert {shard.name: (shard.axis, shard.pieces) for shard in attention.shards} == {
        "q_norm.weight": (0, 2),
        "k_norm.weight": (0, 2),
    }


def test_transformers_own_plan_is_told_where_numbers_would_differ() -> None:
    config = build_model("phi3").config
    config.architectures = ["Phi3ForCausalLM"]
    assert all(record.notes == () for record in plan(skeleton(config), Parallel(tensor=2)).placement)
    config.base_model_tp_plan = {
        "layers.*.self_attn.qkv_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_up_proj": "packed_colwise",
        "layers.*.mlp.down_proj": "colwise",
    }
    found = {record.cls: record.notes for record in plan(skeleton(config), Parallel(tensor=2)).placement}
    assert found == {
        "Phi3Attention": (
            "`qkv_proj`: transformers' own plan (`colwise`) splits its outputs; the graph shows that the outputs of each of its "
            "projections are to be split",
        ),
        "Phi3MLP": (
            "`down_proj`: transformers' own plan (`colwise`) splits its outputs; the graph shows that its inputs are to be split",
        ),
    }


def test_projections_that_are_not_merged_are_repeated_too() -> None:
    model = skeleton(planned_config("llama", num_key_value_heads=2))
    found = make_plan(model, Parallel(tensor=4), capabilities.shipped(), fusions=()).plan
    assert found.is_served, [str(refusal) for refusal in found.refusals]
    linears = layers_of(found, LinearSpec)
    key, query = (linears[f"model.layers.0.self_attn.{part}_proj"] for part in "kq")
    assert isinstance(key, LinearSpec)
    assert isinstance(query, LinearSpec)
    assert (key.style, key.runs, key.copies) == ("column", 2, 2)
    assert (query.style, query.runs, query.copies) == ("column", None, 1)
    rules = {rule.source: (rule.runs, rule.copies) for rule in found.weights}
    assert rules["model.layers.0.self_attn.k_proj.weight"] == (2, 2)
    assert rules["model.layers.0.self_attn.q_proj.weight"] == (1, 1)
