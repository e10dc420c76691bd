"""Architectures of many shapes, served equal to transformers: packed and transposed weights, sinks, heads of two widths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tf_tools.checkpoints import make_checkpoint
from tf_tools.compare import compare_run
from tf_tools.engine import ServeRequest, serve
from tf_tools.reference import reference_for
from tf_tools.sensitivity import probe_prompts

pytestmark = pytest.mark.engine

GPT2_SIZES = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256}
LATENT = {"kv_lora_rank": 64, "q_lora_rank": 48, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
HRM = {"head_dim": 32, "H_cycles": 2, "L_cycles": 2}
MODERNBERT: dict[str, Any] = {
    "pad_token_id": 0,
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 500.0} for kind in ("full_attention", "sliding_attention")
    },
}

# Model type -> config values, and how many layers of each kind it has when it is served; vLLM has one activation for all who ask.
SERVED: dict[str, tuple[Mapping[str, Any], Mapping[str, int]]] = {
    "phi3": ({"pad_token_id": 0}, {"QKVParallelLinear": 2, "MergedColumnParallelLinear": 2, "SiluAndMul": 1}),
    "glm4": ({"head_dim": 32, "pad_token_id": 0}, {"QKVParallelLinear": 2, "MergedColumnParallelLinear": 2}),
    "gpt2": (GPT2_SIZES, {"QKVParallelLinear": 2, "ReplicatedLinear": 6}),
    "gpt_bigcode": (GPT2_SIZES, {"QKVParallelLinear": 2}),
    "gpt_neox": ({}, {"QKVParallelLinear": 0, "ReplicatedLinear": 8}),
    "starcoder2": ({"sliding_window": 16}, {"QKVParallelLinear": 2}),
    "stablelm": ({}, {"QKVParallelLinear": 2, "MergedColumnParallelLinear": 2}),
    "olmo2": ({"head_dim": 32}, {"QKVParallelLinear": 2, "KernelRMSNorm": 9}),
    "gemma": ({"head_dim": 32}, {"QKVParallelLinear": 2, "KernelRMSNorm": 5}),
    "granite": ({"attention_multiplier": 0.25, "residual_multiplier": 0.6}, {"QKVParallelLinear": 2}),
    "granite_swa": ({"sliding_window": 16}, {"QKVParallelLinear": 2}),
    "cohere": ({"pad_token_id": 0}, {"QKVParallelLinear": 2, "MergedColumnParallelLinear": 2}),
    "diffllama": ({}, {"Attention": 4, "AttentionCall": 4, "QKVParallelLinear": 2}),
    "hrm_text": (HRM, {"Attention": 12, "AttentionTurns": 4, "QKVParallelLinear": 4}),
    "modernbert-decoder": (MODERNBERT, {"QKVParallelLinear": 2, "ModernBertDecoderPredictionHead": 1}),
    "minicpm3": ({**LATENT, "num_key_value_heads": 4}, {"Attention": 2, "QKVParallelLinear": 0}),
}


def kinds(model: torch.nn.Module) -> dict[str, int]:
    counts: dict[str, int] = {}
    for module in model.modules():
        counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1
    return counts


@pytest.mark.parametrize("name", SERVED)
def test_equal_eager_with_chunked_prefill(name: str, tmp_path: Path) -> None:
    overrides, expected = SERVED[name]
    folder = make_checkpoint(name, tmp_path / name, overrides=overrides)
    request = ServeRequest(folder, prompts=probe_prompts(384), llm_kwargs={"max_num_batched_tokens": 32}, probe=kinds)
    result = serve(request).require()
    (counts,) = result.probed
    assert isinstance(counts, dict)
    assert {kind: counts.get(kind, 0) for kind in expected} == expected
    assert len(result.runs) == 3
    for run in result.runs:
        report = compare_run(reference_for(folder, run), run)
        assert report.ok, str(report)


def test_sinks_that_are_left_out_would_show(tmp_path: Path) -> None:
    """The comparison sees the sinks: without them the reference is another model."""
    from tf_tools.reference import load_reference, logprobs_of

    folder = make_checkpoint("granite_swa", tmp_path / "sinks", overrides={"sliding_window": 16})
    model, prompt = load_reference(folder), probe_prompts(384)[1]
    sound = logprobs_of(model, prompt)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".sinks"):
                parameter.fill_(-1e9)
    assert float((logprobs_of(model, prompt) - sound).abs().max()) > 0.02


def test_two_calls_that_share_a_layer_would_show(tmp_path: Path) -> None:
    """The comparison sees to which layer a call goes: one cache for both calls of a module is another model."""
    folder = make_checkpoint("diffllama", tmp_path / "shared")
    request = ServeRequest(folder, prompts=probe_prompts(384), runs=1, cached=False, setup=_share_layers)
    (run,) = serve(request).require().runs
    assert not compare_run(reference_for(folder, run), run).ok


def _share_layers() -> None:
    import tf_backend.model.apply as apply
    from vllm_layers_bridge.seams.attention import CHILD

    attach = apply.attach_attention

    def attach_to_first(module: torch.nn.Module, *args: Any, holder: str, **kwargs: Any) -> torch.nn.Module:
        layer = attach(module, *args, holder=holder, **kwargs)
        first = module.get_submodule("attention_call_0")
        setattr(module.get_submodule(holder), CHILD, getattr(first, CHILD))
        return layer

    apply.attach_attention = attach_to_first
