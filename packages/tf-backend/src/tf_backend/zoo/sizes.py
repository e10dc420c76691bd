"""What a field of a config means, and the size it gets in a tiny model. Data alone.

In: nothing. Out: tables that `tf_backend.zoo.shrink` reads. Sizes differ from each other wherever a mix-up of two of them could go
unseen: intermediate, vocabulary and window are apart from hidden = heads x head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 128, 4, 2, 32, 2


def _fields(names: str) -> frozenset[str]:
    return frozenset(names.split())


LAYER_COUNTS = _fields(
    "num_hidden_layers n_layer n_layers num_layers layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers "
    "conf_num_hidden_layers depth num_blocks num_global_layers resampler_depth encoder_num_hidden_layers"
)
"""Fields that count layers. They are shrunk in every part of a model, the others in its text part alone."""

SIZES: Mapping[str, int] = {
    field: size
    for size, fields in (
        (HIDDEN, "hidden_size d_model n_embd dim emb_dim word_embed_proj_dim projection_dim lru_width"),
        (
            HEADS,
            "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads",
        ),
        (
            HEADS,
            "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads num_sliding_attention_heads",
        ),
        (HEADS, "num_attention_heads_per_layer"),
        (
            HEAD_DIM,
            "head_dim d_kv dim_head d_head attention_head_size kv_channels swa_head_dim swa_v_head_dim linear_head_dim",
        ),
        (
            HEAD_DIM,
            "qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim index_head_dim",
        ),
        (HEAD_DIM, "mamba_d_head mamba_head_dim mamba_headdim resampler_head_dim hidden_size_per_layer_input"),
        (192, "intermediate_size ffn_dim n_inner d_ff d_inner hidden_dim dff dim_ff ffn_hidden_size encoder_ffn_dim"),
        (192, "decoder_ffn_dim intermediate_size_mlp dense_intermediate_size feed_forward_size"),
        (96, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size"),
        (96, "share_expert_dim moe_shared_expert_intermediate_size"),
        (
            384,
            "vocab_size vocab_size_per_layer_input decoder_vocab_size entity_vocab_size encoder_hash_byte_group_vocab",
        ),
        (
            256,
            "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions seq_length seq_len",
        ),
        (256, "max_source_positions mamba_d_ssm model_max_length attention_chunk_size"),
        (64, "kv_lora_rank embedding_size global_head_dim qk_head_dim original_max_position_embeddings o_lora_rank"),
        (48, "q_lora_rank"),
        (
            16,
            "sliding_window sliding_window_size attention_window_size window_size attention_window index_topk mamba_d_state",
        ),
        (
            16,
            "ssm_state_size state_size chunk_size mamba_chunk_size laurel_rank rotary_dim time_step_rank mamba_dt_rank",
        ),
        (8, "mamba_n_heads mamba_num_heads"),
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads index_n_heads"),
        (4, "linear_num_heads zero_expert_num"),
        (2, "linear_num_key_heads num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts"),
        (2, "attn_layer_period expert_layer_period moe_layer_interval"),
        (1, "max_window_layers num_dense_layers first_k_dense_replace attn_layer_offset"),
    )
    for field in fields.split()
}
"""Field -> its size. A field that is absent, None, zero or smaller already stays as it is."""

KV_COUNTS = _fields(
    "num_key_value_heads num_kv_heads kv_n_heads num_query_groups swa_num_key_value_heads num_global_key_value_heads"
)
"""Fields that count key-value heads: one stays one, as many as query heads stay so, else there are `KV_HEADS`."""

GROUPS = {"n_group": 2, "topk_group": 1, "num_expert_group": 2, "n_groups": 1, "mamba_n_groups": 1, "mamba_ngroups": 1}
"""Groups of experts or heads, by field. Experts in groups are twice as many."""

EPS = _fields("rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon layernorm_epsilon")
"""Large, so that reading the config's value shows in the numbers."""
EPS_VALUE = 0.2

ROPE_THETA = 500.0

_ROPE = {"rope_type": "default", "rope_theta": ROPE_THETA}
_SECTIONS = {**_ROPE, "mrope_section": [6, 6, 4]}

EXCEPTIONS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": 32},
    "blt": {"vocab_size": 260},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _SECTIONS, "full_attention": _SECTIONS},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": ROPE_THETA},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "ernie4_5_vl_moe_text": {"rope_parameters": _SECTIONS},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "falcon_h1": {"mamba_d_ssm": 256, "mamba_d_head": 32},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM, "num_experts": 4, "moe_topk": 2},
    "hunyuan_vl_text": {"head_dim": HEAD_DIM},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 32},
    "ministral": {"head_dim": HEAD_DIM, "layer_types": ["sliding_attention", "full_attention"]},
    "nemotron": {"num_key_value_heads": KV_HEADS},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds_dim": [64, 64], "axial_pos_shape": [16, 16]},
    "squeezebert": {"embedding_size": HIDDEN},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "hybrid"] * 3},
}
"""Model type -> values of its config (of its text part, where it has several) that no rule gives."""
