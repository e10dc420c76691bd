"""Latent attention through vLLM's MLA layer: what keys and values are made of is all that is cached, and the model is equal."""

from __future__ import annotations

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

SIZES = {"q_lora_rank": 48, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4}
LATENT = {**SIZES, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""The one pair of sizes that vLLM's latent attention on a CPU takes."""
REFERENCE = {"attention_backend": "CPU_MLA"}
"""vLLM's latent attention for every CPU and for float32; that with AMX takes bfloat16 alone."""


def kinds(model: torch.nn.Module) -> dict[str, int]:
    names = [type(module).__name__ for module in model.modules()]
    return {name: names.count(name) for name in ("MLAAttention", "Attention")}


@pytest.mark.parametrize("name", ["deepseek_v3", "axk1"])
def test_equal_with_nothing_but_latents_in_the_cache(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path / name, overrides=LATENT)
    result = serve(ServeRequest(folder, prompts=probe_prompts(384), llm_kwargs=REFERENCE, probe=kinds)).require()
    assert result.probed == ({"MLAAttention": 2, "Attention": 0},)
    assert len(result.runs) == 3
    for run in result.runs:
        report = compare_run(reference_for(folder, run), run)
        assert report.ok, str(report)


@pytest.mark.parametrize("fault", ["scale", "rotary"])
def test_faults_would_show(fault: str, tmp_path: Path) -> None:
    folder = make_checkpoint("deepseek_v3", tmp_path / "faulty", overrides=LATENT)
    setup = {"scale": _halve_the_scale, "rotary": _drop_the_shared_features}[fault]
    request = ServeRequest(folder, prompts=probe_prompts(384), llm_kwargs=REFERENCE, runs=1, cached=False, setup=setup)
    (run,) = serve(request).require().runs
    report = compare_run(reference_for(folder, run), run)
    assert report.worst > 0.02, str(report)


def test_sizes_that_are_cached_expanded_are_refused_where_the_cache_is_laid_out_for_latents(tmp_path: Path) -> None:
    overrides = {**SIZES, "kv_lora_rank": 64, "qk_rope_head_dim": 32}
    folder = make_checkpoint("deepseek_v3", tmp_path / "small", overrides=overrides)
    text = serve(ServeRequest(folder, prompts=((5, 6, 7),), llm_kwargs=REFERENCE)).error_text()
    assert "OptionRefused" in text
    assert "takes 512 with 64 shared features, and this has 64 with 32" in text
    assert "Set VLLM_MLA_DISABLE=1" in text
    assert "leave out `--attention-backend CPU_MLA`" in text


def _halve_the_scale() -> None:
    import vllm_layers_bridge.seams.attention as seam

    build = seam.build_latent_layer

    def faulty(*args: Any) -> Any:
        layer = build(*args)
        layer.attention.impl.scale *= 0.5
        return layer

    seam.build_latent_layer = faulty


def _drop_the_shared_features() -> None:
    from vllm_layers_bridge.seams.latent import LatentLayer

    forward = LatentLayer.forward
    LatentLayer.forward = lambda self, query, shared, latent: forward(self, query, shared * 0.0, latent)  # type: ignore[method-assign]
