"""Decoders split over real processes give the hidden states of transformers: each way to split a module, on two ranks and on four."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import moe_runner
import msgspec
import pytest
from moe_runner import ExpertsSpec
from tf_backend.plan.schema import ParameterShard
from vllm_layers_bridge.layers import linear, parallel_norm, shards
from vllm_layers_bridge.specs import LinearSpec, RMSNormSpec

pytestmark = pytest.mark.engine

LATENT = {"kv_lora_rank": 64, "q_lora_rank": 48, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
GEMMA4 = {
    "head_dim": 32,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
    "vocab_size_per_layer_input": 384,
    "hidden_size_per_layer_input": 32,
    "rope_parameters": None,
    "pad_token_id": 0,
}

DEEPSEEK = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 64,
    "n_shared_experts": 1, "first_k_dense_replace": 0, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
QWEN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
UNEVEN = {**QWEN, "shared_expert_intermediate_size": 63}

# How a module is split -> model type, ranks, config values.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "a query norm over all heads, one key-value head on both ranks": ("olmo2", 2, {"num_key_value_heads": 1}),
    "norms over all heads, each key-value head on two ranks": ("olmo2", 4, {}),
    "norms before the output projections": ("bitnet", 2, {}),
    "heads spelled in the forward": ("stablelm", 2, {}),
    "heads spelled in a helper, queries, keys and values in turn": ("persimmon", 2, {}),
    "one key-value head in a packed weight": ("gpt_bigcode", 4, {"n_embd": 128, "n_layer": 2, "n_head": 4}),
    "low-rank projections, memory that is written to": ("minicpm3", 2, {"num_key_value_heads": 4, **LATENT}),
    "a norm weight for each head, key-value heads on two ranks each": (
        "cohere",
        4,
        {"use_qk_norm": True, "pad_token_id": 0},
    ),
    "key and value projections that are not merged, on two ranks each": ("gemma4_text", 4, GEMMA4),
    "shared experts in the runner, beside a factor": ("deepseek_v3", 2, DEEPSEEK),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_together_give_what_transformers_gives(case: str, on_ranks: Callable[..., Any]) -> None:
    name, ranks, overrides = CASES[case]
    result = on_ranks(name, ranks, **overrides)
    assert result.error < 1e-5
    layers = [layer for module in result.planned.plan.modules for layer in module.layers]
    assert any(isinstance(layer, LinearSpec) and layer.style == "row" for layer in layers)
    if name in {"olmo2", "bitnet"}:
        assert any(isinstance(layer, RMSNormSpec) and layer.pieces > 1 for layer in layers)
    if name == "cohere":
        split = [shard for module in result.planned.plan.modules for shard in module.shards]
        assert ParameterShard("k_norm.weight", 0, 2) in split


def test_shared_experts_that_cannot_be_split_are_counted_once(on_ranks: Callable[..., Any]) -> None:
    result = on_ranks("qwen2_moe", 2, **UNEVEN)
    assert result.error < 1e-5
    shared = [layer.shared for m in result.planned.plan.modules for layer in m.layers if isinstance(layer, ExpertsSpec)]
    assert [spec is not None and spec.whole for spec in shared] == [True, True]


def test_shared_experts_that_are_summed_twice_would_be_seen(
    on_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def summing(spec: Any, *args: Any) -> Any:
        return linear.build_linear(msgspec.structs.replace(spec, reduces=True), *args)

    monkeypatch.setattr(import_module("vllm_layers_bridge.layers.build"), "build_linear", summing)
    assert on_ranks("qwen2_moe", 2, **QWEN).error > 1e-3


def test_shared_experts_that_each_rank_counts_would_be_seen(
    on_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_runner, "build_shared", moe_runner.SharedExperts)
    assert on_ranks("qwen2_moe", 2, **UNEVEN).error > 1e-3


def test_another_ranks_run_of_a_norm_would_be_seen(
    on_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "run_of_rank", lambda rank, ranks, pieces: 0)
    assert on_ranks("olmo2", 2).error > 1e-3


def test_a_mean_over_one_rank_alone_would_be_seen(
    on_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = parallel_norm.ParallelRMSNorm.forward

    def alone(self: Any, x: Any) -> Any:
        self.reduce = lambda mean: mean * self.ranks
        return forward(self, x)

    monkeypatch.setattr(parallel_norm.ParallelRMSNorm, "forward", alone)
    assert on_ranks("olmo2", 2).error > 1e-3
