"""Two real processes give what transformers gives: heads split, key-value heads repeated, sums over ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tf_tools.checkpoints import make_checkpoint
from tf_tools.compare import compare_run
from tf_tools.engine import TENSOR_PARALLEL_2, ServeRequest, serve
from tf_tools.reference import reference_for
from tf_tools.sensitivity import probe_prompts

pytestmark = pytest.mark.engine


def assert_equal_on_two_ranks(folder: Path) -> None:
    result = serve(
        ServeRequest(
            folder,
            prompts=probe_prompts(384),
            runs=1,
            llm_kwargs={"tensor_parallel_size": 2, "max_num_batched_tokens": 32},
            environment=TENSOR_PARALLEL_2,
            timeout=600.0,
        )
    ).require()
    assert result.served_by == ("tf_backend.model.served.TransformersForCausalLM",) * 2
    for run in result.runs:
        report = compare_run(reference_for(folder, run), run)
        assert report.ok, str(report)


def test_one_key_value_head_on_two_ranks(tmp_path: Path) -> None:
    assert_equal_on_two_ranks(make_checkpoint("llama-biased", tmp_path / "model", overrides={"num_key_value_heads": 1}))


def test_projections_that_are_not_fused(checkpoint: Callable[[str], Path]) -> None:
    assert_equal_on_two_ranks(checkpoint("phi"))


def test_several_projections_in_one_weight(checkpoint: Callable[[str], Path]) -> None:
    assert_equal_on_two_ranks(checkpoint("phi3"))
