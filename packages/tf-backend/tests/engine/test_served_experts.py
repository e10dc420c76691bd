"""Models with experts equal transformers: in the engine's runner, as they are written, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tf_tools.checkpoints import GROUPED, make_checkpoint
from tf_tools.compare import compare_run
from tf_tools.engine import ServeRequest, serve
from tf_tools.reference import reference_for
from tf_tools.sensitivity import probe_prompts

pytestmark = pytest.mark.engine

LLAMA4: dict[str, Any] = {
    "head_dim": 32,
    "intermediate_size_mlp": 192,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 128,
    "floor_scale": 4,
    "attn_scale": 2.0,
}
"""The temperature of attention changes every four positions, and by much."""


def experts_in(model: torch.nn.Module) -> dict[str, int]:
    kinds = [type(module).__name__ for module in model.modules() if type(module).__module__.startswith("moe_runner.")]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def assert_equal(folder: Path, *kinds: str, eager: bool = True) -> None:
    request = ServeRequest(
        folder,
        prompts=probe_prompts(384),
        enforce_eager=eager,
        llm_kwargs={"max_num_batched_tokens": 32},
        probe=experts_in,
    )
    result = serve(request).require()
    assert result.probed == (dict.fromkeys(sorted(kinds), 2),)
    for run in result.runs:
        report = compare_run(reference_for(folder, run), run)
        assert report.ok, str(report)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_experts_in_the_runner(eager: bool, checkpoint: Callable[[str], Path]) -> None:
    assert_equal(checkpoint("mixtral"), "RoutedExperts", "RouterLogits", eager=eager)


def test_the_engine_chooses_among_groups_with_a_correction(tmp_path: Path) -> None:
    """Compiled, since the correction is loaded after the graph's owner was handed it; nothing of it would show at its default, zero."""
    folder = make_checkpoint("deepseek_v3", tmp_path / "model", overrides=GROUPED)
    (file,) = folder.glob("*.safetensors")
    corrections = [value for name, value in load_file(file).items() if name.endswith("e_score_correction_bias")]
    assert len(corrections) == 2
    assert all(float(value.std()) > 0.1 for value in corrections)
    assert_equal(folder, "RoutedExperts", "RouterLogits", "Scaled", "SharedExperts", eager=False)


def test_experts_with_biases_in_alternating_rows(tmp_path: Path) -> None:
    folder = make_checkpoint("gpt_oss", tmp_path / "model", overrides={"swiglu_limit": 7.0})
    assert_equal(folder, "RoutedExperts")


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_experts_with_a_limit_that_no_kernel_has(eager: bool, checkpoint: Callable[[str], Path]) -> None:
    assert_equal(checkpoint("gpt_oss"), "WrittenExperts", eager=eager)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_rows_for_each_expert_and_a_temperature_by_position(eager: bool, tmp_path: Path) -> None:
    """Prompts in chunks: a token's place in its row is not its position. Attention in chunks longer than all that is served."""
    assert_equal(make_checkpoint("llama4_text", tmp_path / "model", overrides=LLAMA4), "RoutedExperts", eager=eager)


def test_a_chunk_of_attention_that_is_too_short_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("llama4_text", tmp_path / "model", overrides={**LLAMA4, "attention_chunk_size": 64})
    result = serve(ServeRequest(folder, prompts=probe_prompts(384), runs=1))
    assert "Set `--max-model-len 64` or less" in result.error_text()
