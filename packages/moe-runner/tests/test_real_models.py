"""Recognition on the sparse and dense models of transformers, built small on meta and called as their own forward calls them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import moe_runner
import pytest
import torch
from moe_runner import SparseBlock
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, masking_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.dbrx.modeling_dbrx import DbrxFFN

BASE = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}


def build(model_type: str, **options: Any) -> nn.Module:
    config = CONFIG_MAPPING[model_type](**options)
    with torch.device("meta"):
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, attn_implementation="eager").eval()


def calls_of(model: nn.Module) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """What each module is called with in one run on meta, as far as the run comes."""
    seen: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def watch(name: str, module: nn.Module) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.setdefault(name, (args, dict(kwargs)))

        return module.register_forward_pre_hook(note, with_kwargs=True)

    handles = [watch(name, module) for name, module in model.named_modules()]
    tokens = torch.zeros((1, 37), dtype=torch.long, device="meta")
    # transformers reads positions to see whether sequences are packed, and positions on meta have no values
    packed = mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)
    try:
        with torch.no_grad(), packed:
            model(input_ids=tokens, use_cache=False)
    except Exception:  # experts need the data of a tensor: the calls up to there are what is wanted
        pass
    finally:
        for handle in handles:
            handle.remove()
    return seen


def recognized(model: nn.Module) -> dict[str, SparseBlock]:
    seen = calls_of(model)
    found = {name: moe_runner.recognize(module, *seen.get(name, ())) for name, module in model.named_modules()}
    return {name: block for name, block in found.items() if block is not None}


# name of the block in layer 0, experts, top-k, score function and its order, shared experts
SPARSE = {
    "mixtral": ({"num_local_experts": 4}, "mlp", 4, 2, "softmax", "before", None),
    "qwen2_moe": ({"num_experts": 8, "num_experts_per_tok": 3}, "mlp", 8, 3, "softmax", "before", "shared_expert"),
    "qwen3_moe": ({"num_experts": 8, "num_experts_per_tok": 3}, "mlp", 8, 3, "softmax", "before", None),
    "olmoe": ({"num_experts": 4, "num_experts_per_tok": 2}, "mlp", 4, 2, "softmax", "before", None),
    "granitemoe": (
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        "block_sparse_moe",
        4,
        2,
        "softmax",
        "after",
        None,
    ),
    "phimoe": ({"num_local_experts": 4}, "mlp", 4, 2, "softmax", "after", None),
    "deepseek_v2": (LATENT, "mlp", 8, 2, "softmax", "before", "shared_experts"),
    "deepseek_v3": (LATENT, "mlp", 8, 2, "sigmoid", "before", "shared_experts"),
    "glm4_moe": (
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 0, "head_dim": 32},
        "mlp",
        8,
        2,
        "sigmoid",
        "before",
        "shared_experts",
    ),
    "ernie4_5_moe": (
        {"moe_num_experts": 8, "moe_k": 3, "moe_layer_start_index": 0},
        "mlp",
        8,
        3,
        "softmax",
        "before",
        "shared_experts",
    ),
    "hunyuan_v1_moe": (
        {"num_experts": 4, "moe_topk": 2, "head_dim": 32},
        "mlp",
        4,
        2,
        "softmax",
        "before",
        "shared_mlp",
    ),
    "dots1": (
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 64,
        },
        "mlp",
        8,
        2,
        "sigmoid",
        "before",
        "shared_experts",
    ),
    "minimax_m2": ({"num_local_experts": 8, "head_dim": 32}, "mlp", 8, 8, "sigmoid", "before", None),
    "gpt_oss": ({"num_local_experts": 4, "head_dim": 32}, "mlp", 4, 4, "softmax", "after", None),
    "llama4_text": (
        {"num_local_experts": 2, "intermediate_size_mlp": 192, "head_dim": 32, "interleave_moe_layer_step": 1},
        "feed_forward",
        2,
        1,
        "sigmoid",
        "after",
        "shared_expert",
    ),
    "afmoe": (
        {"num_experts": 8, "num_experts_per_tok": 2, "num_dense_layers": 0, "head_dim": 32, "num_shared_experts": 1},
        "mlp",
        8,
        2,
        "sigmoid",
        "before",
        "shared_experts",
    ),
    "gemma4_text": (
        {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
            "vocab_size_per_layer_input": 384,
            "head_dim": 32,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 32,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "",
        4,
        2,
        "softmax",
        "before",
        "mlp",
    ),
    "longcat_flash": (
        LATENT | {"num_layers": 2, "zero_expert_num": 4, "expert_ffn_hidden_size": 64, "head_dim": 16},
        "mlp",
        8,
        2,
        "softmax",
        "before",
        None,
    ),
    "zaya": ({"num_experts": 4, "head_dim": 32}, "mlp", 4, 1, "softmax", "before", None),
}


@pytest.mark.parametrize("model_type", SPARSE)
def test_one_block_in_every_sparse_layer_and_its_routing(model_type: str) -> None:
    options, child, experts, top_k, score, order, shared = SPARSE[model_type]
    found = recognized(build(model_type, **BASE | options))
    first, second = (f"model.layers.{index}" + (f".{child}" if child else "") for index in (0, 1))
    assert set(found) <= {first, second}
    block = found[first]
    assert (block.num_experts, block.top_k, block.score, block.score_order) == (experts, top_k, score, order)
    assert block.shared_experts == shared
    assert block.experts == "experts"
    assert block.storage == "stacked parameters"
    assert block.called
    assert f"{experts} experts, top {top_k}, {score} {order} top-k" in block.describe()
    assert any("torch.topk" in line or ".topk(" in line or ".max(" in line for line in block.evidence)
    assert not any(".py" in line or "/" in line.split(" ")[0] for line in block.evidence)


def test_experts_that_stand_in_one_matrix() -> None:
    config = CONFIG_MAPPING["dbrx"](
        d_model=64, ffn_config={"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 96}
    )
    with torch.device("meta"):
        block = moe_runner.recognize(DbrxFFN(config).eval(), (torch.empty(1, 37, 64),))
    assert block is not None
    assert block.describe() == (
        "4 experts, top 2, softmax before top-k, experts as stacked parameters `experts.mlp.w1`"
    )
    assert block.parameters == ("experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2")


def test_experts_inside_attention_and_in_the_mlp() -> None:
    model = build("jetmoe", **BASE | {"kv_channels": 32, "num_local_experts": 4, "num_experts_per_tok": 2})
    found = recognized(model)
    layers = ("model.layers.0", "model.layers.1")
    assert set(found) == {f"{layer}.{child}" for layer in layers for child in ("mlp", "self_attention.experts")}
    for block in found.values():
        assert block.num_experts == 4
        assert block.parameters == ("input_linear.weight", "output_linear.weight")
    # the attention calls two methods of its experts and never their forward
    assert not found["model.layers.0.self_attention.experts"].called


def test_a_router_that_cannot_run_to_its_end_still_shows_its_choice() -> None:
    model = build("jetmoe", **BASE | {"kv_channels": 32, "num_local_experts": 4, "num_experts_per_tok": 2})
    block = moe_runner.recognize(model.get_submodule("model.layers.0.mlp"), (torch.empty(1, 37, 128, device="meta"),))
    assert block is not None
    assert (block.top_k, block.score, block.score_order) == (2, "softmax", "after")
    assert block.returns_router_logits is None
    assert any("not followed beyond" in line and "tolist" not in line.split("(")[0] for line in block.evidence)


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "gpt_oss", "phimoe", "zaya"])
def test_a_block_that_was_never_called_is_told_by_its_structure(model_type: str) -> None:
    options, child, experts, *_ = SPARSE[model_type]
    model = build(model_type, **BASE | options)
    found = {name: moe_runner.recognize(module) for name, module in model.named_modules()}
    names = [name for name, block in found.items() if block is not None]
    assert names == [f"model.layers.{index}.{child}" for index in (0, 1)]
    block = found[names[0]]
    assert block is not None
    assert not block.called
    assert (block.num_experts, block.top_k, block.score, block.returns_router_logits) == (experts, None, None, None)
    assert "never called, so how tokens are routed is not known" in block.describe()


GPT = {"vocab_size": 384, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256}
DENSE = {
    "llama": BASE,
    "qwen3": BASE | {"head_dim": 32},
    "gemma2": BASE | {"head_dim": 32},
    "phi3": BASE | {"pad_token_id": 0},
    "gpt2": GPT,
    "opt": BASE | {"ffn_dim": 192, "word_embed_proj_dim": 128},
    "smollm3": BASE | {"pad_token_id": 0},
    "mamba": {"vocab_size": 384, "hidden_size": 128, "num_hidden_layers": 2, "state_size": 8},
    "falcon_h1": BASE | {"head_dim": 32, "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32},
    "xlnet": {"vocab_size": 384, "d_model": 128, "n_layer": 2, "n_head": 4, "d_inner": 192},
    "gemma4_text": {**SPARSE["gemma4_text"][0], **BASE, "enable_moe_block": False},
}


@pytest.mark.parametrize("model_type", DENSE)
def test_a_dense_model_has_no_block(model_type: str) -> None:
    model = build(model_type, **DENSE[model_type])
    assert recognized(model) == {}
    assert all(moe_runner.recognize(module) is None for module in model.modules())
