"""Configurations that break backends like this one: each stands for a kind of fault, and has its own sizes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tf_tools.checkpoints import make_checkpoint
from tf_tools.compare import compare_run
from tf_tools.engine import ServeRequest, serve
from tf_tools.reference import load_reference, reference_for
from tf_tools.sensitivity import probe_prompts

pytestmark = pytest.mark.engine

CONTEXT = 256
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [3.0] * 16,
    "original_max_position_embeddings": 128,
    "factor": 2.0,
}
GEMMA4 = {
    "vocab_size_per_layer_input": 384,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 500.0},
    },
}

GEMMA4_EXPERTS = {
    **GEMMA4,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 64,
}

# Model type, config values, options of the engine, whether compiled.
CASES: dict[str, tuple[str, Mapping[str, Any], Mapping[str, Any], bool]] = {
    "scale as an argument": ("opt", {"ffn_dim": 192, "word_embed_proj_dim": 128}, {}, False),
    "tied head with a bias": ("phi", {"tie_word_embeddings": True}, {}, False),
    "heads of two widths": ("gemma4_text", GEMMA4, {}, False),
    "heads of two widths, experts beside the MLP": ("gemma4_text", GEMMA4_EXPERTS, {}, False),
    "scaled embedding, compiled": ("gemma2", {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32}, {}, True),
    "packed, compiled": ("phi3", {"pad_token_id": 0}, {}, True),
    "frequencies that follow the length, within": ("llama", DYNAMIC, {"max_model_len": 128}, False),
    "frequencies that follow the length, beyond, compiled": ("llama", DYNAMIC, {"max_model_len": 512}, True),
    "two sets of frequencies, the first": ("phi3", {"pad_token_id": 0, "rope_parameters": LONG}, {"max_model_len": 128}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equal(name: str, tmp_path: Path) -> None:
    model_type, overrides, options, is_compiled = CASES[name]
    folder = make_checkpoint(model_type, tmp_path / model_type, overrides=overrides)
    request = ServeRequest(
        folder,
        prompts=probe_prompts(384),
        enforce_eager=not is_compiled,
        llm_kwargs={"max_num_batched_tokens": 32, **options},
    )
    result = serve(request).require()
    assert len(result.runs) == 3
    for run in result.runs:
        report = compare_run(reference_for(folder, run), run)
        assert report.ok, str(report)


def test_beyond_the_length_tokens_are_rotated_as_when_they_are_generated_one_by_one(tmp_path: Path) -> None:
    """The reference is transformers with its cache, fed one token at a time."""
    overrides = {**DYNAMIC, "max_position_embeddings": 48}
    folder = make_checkpoint("llama", tmp_path / "dynamic", overrides=overrides)
    prompt = tuple(probe_prompts(384)[1][:40])
    request = ServeRequest(folder, prompts=(prompt,), max_tokens=40, llm_kwargs={"max_model_len": 96})
    (sequence,) = serve(request).require().runs[0]
    model = load_reference(folder)
    cache, found = None, []
    with torch.no_grad():
        for token in (*prompt, *sequence.tokens)[:-1]:
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits[0, -1].log_softmax(-1))
    served = sequence.logprobs
    assert len(served) + sequence.start == len(found)
    assert float((torch.stack(found)[sequence.start :] - served).abs().max()) < 2e-3
