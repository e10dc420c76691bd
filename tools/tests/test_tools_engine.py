"""vLLM's own implementations pass the oracle, and what an engine can do wrong ends in an answer.

These tests need no product: they hold the oracle against servers that are known to be right, or known to fail.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tf_tools.bad_inputs import BAD_INPUTS
from tf_tools.compare import compare_run
from tf_tools.engine import EngineError, MissingVocabulary, ServeRequest, dense_logprobs, serve
from tf_tools.reference import reference_for
from tf_tools.sensitivity import probe_prompts

Checkpoint = Callable[[str], Path]


@dataclass
class Logprob:
    logprob: float


def native(folder: Path, **changes: object) -> ServeRequest:
    return ServeRequest(folder, probe_prompts(384), model_impl="vllm", plugins=(), **changes)  # type: ignore[arg-type]


def test_dense_rows_are_in_the_order_of_the_vocabulary() -> None:
    row = dense_logprobs({2: Logprob(-2.0), 0: Logprob(-1.0), 1: Logprob(float("-inf"))}, 3)
    assert row.tolist() == [-1.0, float("-inf"), -2.0]


@pytest.mark.parametrize("tokens", [(0, 2), (0, 1, 2, 3), ()])
def test_a_missing_or_foreign_entry_is_refused(tokens: tuple[int, ...]) -> None:
    with pytest.raises(MissingVocabulary, match=r"0\.\.2"):
        dense_logprobs({t: Logprob(0.0) for t in tokens}, 3)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_a_right_server_is_accepted(name: str, checkpoint: Checkpoint) -> None:
    """Chunked prefill and mixed batches (32 tokens a step), twice over, then from the prefix cache."""
    folder = checkpoint(name)
    answer = serve(native(folder, llm_kwargs={"max_num_batched_tokens": 32}, probe=_count_attention_layers)).require()
    assert len(answer.runs) == 3
    for run in answer.runs:
        report = compare_run(reference_for(folder, run), run)
        assert report.ok, str(report)
        assert report.worst < 2e-4
    assert answer.cached_tokens == (0, 32)
    assert [s.start for s in answer.runs[-1]] == [4, 39]
    assert answer.served_by[0].startswith("vllm.model_executor.models.")
    assert answer.probed == (2,)


@pytest.mark.engine
def test_a_wrong_server_is_rejected(checkpoint: Checkpoint) -> None:
    """vLLM's own gpt_oss fixes eps at 1e-5 and the clamp at 7, whatever the config says."""
    folder = checkpoint("gpt_oss")
    answer = serve(native(folder, runs=1, cached=False)).require()
    assert not compare_run(reference_for(folder, answer.runs[0]), answer.runs[0]).ok


@pytest.mark.engine
def test_a_broken_checkpoint_gives_a_row_and_not_an_exception(checkpoint: Checkpoint, tmp_path: Path) -> None:
    bad = BAD_INPUTS["truncated-shard"](checkpoint("llama"), tmp_path / "bad")
    answer = serve(native(bad.folder))
    assert not answer.ok
    assert answer.failure is not None
    assert answer.failure.kind == "raised"
    assert answer.exit_status != 0
    assert answer.runs == ()
    with pytest.raises(EngineError, match="raised"):
        answer.require()


@pytest.mark.engine
def test_setup_runs_in_the_child_and_its_death_is_reported(checkpoint: Checkpoint) -> None:
    answer = serve(native(checkpoint("llama"), setup=lambda: os._exit(9)))
    assert answer.failure is not None
    assert "exit status 9" in answer.failure.message


@pytest.mark.engine
def test_a_hanging_engine_is_ended(checkpoint: Checkpoint) -> None:
    answer = serve(native(checkpoint("llama"), setup=lambda: time.sleep(600), timeout=1.0))
    assert answer.failure is not None
    assert answer.failure.kind == "timeout"


@pytest.mark.engine
def test_the_environment_is_the_childs_alone(checkpoint: Checkpoint) -> None:
    before = os.environ.get("VLLM_PLUGINS")

    def tell() -> None:
        raise RuntimeError(f"{os.environ['VLLM_PLUGINS']!r} {os.environ['TF_TOOLS_EXAMPLE']}")

    answer = serve(native(checkpoint("llama"), setup=tell, environment={"TF_TOOLS_EXAMPLE": "yes"}))
    assert answer.failure is not None
    assert answer.failure.message == "RuntimeError: '' yes"
    assert os.environ.get("VLLM_PLUGINS") == before
    assert "TF_TOOLS_EXAMPLE" not in os.environ


def _count_attention_layers(model: torch.nn.Module) -> int:
    return sum(type(m).__name__ == "Attention" for m in model.modules())
