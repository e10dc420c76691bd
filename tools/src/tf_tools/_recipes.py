"""Tiny checkpoints as data: the config of each recipe, and how its weights are drawn.

A recipe is a model small enough to run in milliseconds in which every feature matters: dropping any one of them moves a
log-probability by at least ten times the tolerance that `tf_tools.compare` allows. `tests/test_sensitivity.py` holds
that; when a feature is invisible there, it is this table that has to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Draw:
    """How the parameters whose full name matches `pattern` (`re.search`) are drawn, and why not as the others.

    A matrix is drawn as N(0, std); a vector, or a bias of any rank, gets N(0, std) added to its initial value. `shift`
    is then added to both.
    """

    pattern: str
    std: float
    reason: str
    shift: float = 0.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """One tiny model: `CONFIG_MAPPING[model_type](**config)` with weights drawn by the first `Draw` that matches."""

    model_type: str
    config: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    draws: tuple[Draw, ...] = ()


# Sizes differ from each other wherever a mix-up of two of them could go unseen: hidden 128 = heads x head_dim, so that
# models without a head_dim field agree with those that have one, but intermediate, vocabulary and window are apart.
# rms_norm_eps is large: at 1e-6 a server that ignores the config's eps could not be told from one that reads it. The
# rotary base is no library's default, for the same reason.
SIZES: Mapping[str, object] = MappingProxyType(
    {
        "vocab_size": 384,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "rms_norm_eps": 0.2,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)

GROUPED: Mapping[str, object] = MappingProxyType(
    {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
    }
)
"""Sizes beside `SIZES` for models of the form of deepseek_v3: latent attention, experts in groups, shared experts, no dense layer."""

MATRIX_STD = 0.15
VECTOR_STD = 0.25

# Gemma 2: caps, tied head, post-norms and the tanh form of GELU must all be visible in one model.
_GEMMA2 = (
    Draw(r"(q|k)_proj\.weight$", 0.3, "attention scores must reach the soft cap: tanh is the identity well below it"),
    Draw(
        r"embed_tokens\.weight$",
        0.05,
        "small, so that each norm's eps counts beside the residual stream; shifted, so that the stream has a constant "
        "part, which gate_proj below turns into a negative gate",
        shift=0.1,
    ),
    Draw(
        r"gate_proj\.weight$",
        0.04,
        "gates near -3, where the two forms of GELU differ by a tenth of their value; near 0 they agree to 1e-3",
        shift=-0.04,
    ),
    Draw(r"up_proj\.weight$", 1.0, "makes up for the small values that GELU has at negative gates"),
    Draw(
        r"^model\.norm\.weight$",
        6.0,
        "logits must reach the final soft cap in spite of small embeddings; centred on 1 + w = 0, so that the constant "
        "part of the stream does not move all logits alike",
        shift=-1.0,
    ),
)
_WINDOW: Mapping[str, object] = MappingProxyType({"sliding_window": 16})


def _sized(**config: object) -> Mapping[str, object]:
    return MappingProxyType({**SIZES, **config})


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "llama": Recipe("llama", _sized(head_dim=32, tie_word_embeddings=False)),
        "llama-tied": Recipe("llama", _sized(head_dim=32, tie_word_embeddings=True)),
        "llama-biased": Recipe("llama", _sized(head_dim=32, attention_bias=True, mlp_bias=True)),
        "qwen2": Recipe("qwen2", _sized(tie_word_embeddings=False)),
        "qwen2-sliding": Recipe(
            "qwen2",
            _sized(use_sliding_window=True, max_window_layers=1, tie_word_embeddings=True, **_WINDOW),
        ),
        "qwen3": Recipe("qwen3", _sized(head_dim=32, tie_word_embeddings=True)),
        "mistral": Recipe("mistral", _sized(head_dim=32, tie_word_embeddings=False, **_WINDOW)),
        # Four layers make the residual stream large: eps must be larger too to count in the last.
        "smollm3": Recipe(
            "smollm3",
            _sized(num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0], rms_norm_eps=0.5, tie_word_embeddings=True),
        ),
        # The query scalar is not head_dim, so that a server which guesses head_dim**-0.5 is caught.
        "gemma2": Recipe(
            "gemma2",
            _sized(
                head_dim=32,
                query_pre_attn_scalar=48,
                attn_logit_softcapping=8.0,
                final_logit_softcapping=12.0,
                layer_types=["sliding_attention", "full_attention"],
                **_WINDOW,
            ),
            _GEMMA2,
        ),
        # No multiplier is 1, nor what another model has as its default.
        "granite": Recipe(
            "granite",
            _sized(
                embedding_multiplier=3.0,
                attention_multiplier=0.25,
                residual_multiplier=0.6,
                logits_scaling=0.5,
                attention_bias=True,
                mlp_bias=True,
                tie_word_embeddings=False,
            ),
        ),
        # As many kv heads as query heads; one norm for both branches; half of each head rotated; biases everywhere.
        "phi": Recipe(
            "phi",
            _sized(
                num_key_value_heads=4,
                layer_norm_eps=0.2,
                rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
                tie_word_embeddings=False,
            ),
            (
                Draw(r"fc1\.weight$", 0.05, "keeps the inputs of GELU near the shifted bias"),
                Draw(r"fc1\.bias$", 0.25, "inputs near -3.5, where the two forms of GELU differ", shift=-3.5),
                Draw(r"fc2\.weight$", 4.0, "makes up for the small values that GELU has there"),
            ),
        ),
        "phi3": Recipe("phi3", _sized(tie_word_embeddings=False)),  # packed: one linear for q, k, v; one for gate, up
        "mixtral": Recipe(
            "mixtral", _sized(head_dim=32, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False)
        ),
        "gpt_oss": Recipe(
            "gpt_oss",
            _sized(
                head_dim=32,
                num_local_experts=4,
                num_experts_per_tok=2,
                swiglu_limit=1.5,
                rope_parameters={
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 64,
                },
                layer_types=["sliding_attention", "full_attention"],
                **_WINDOW,
            ),
        ),
    }
)
