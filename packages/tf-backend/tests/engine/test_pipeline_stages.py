"""Two pipeline stages in two real processes give what transformers gives; what the engine lacks for them is told at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tf_tools.compare import compare_run
from tf_tools.engine import TENSOR_PARALLEL_2, ServeRequest, serve, warm
from tf_tools.fork import run_in_fork
from tf_tools.reference import reference_for
from tf_tools.sensitivity import probe_prompts

pytestmark = pytest.mark.engine


def test_two_stages_compiled(checkpoint: Callable[[str], Path]) -> None:
    """Scaled embeddings and a tied head, in chunks: vLLM's CPU engine runs stages compiled alone."""
    folder = checkpoint("gemma2")
    result = serve(
        ServeRequest(
            folder,
            prompts=probe_prompts(384),
            enforce_eager=False,
            runs=1,
            llm_kwargs={"pipeline_parallel_size": 2, "max_num_batched_tokens": 32},
            environment=TENSOR_PARALLEL_2,
            timeout=600.0,
        )
    ).require()
    assert result.served_by == ("tf_backend.model.served.TransformersForCausalLM",) * 2
    for run in result.runs:
        report = compare_run(reference_for(folder, run), run)
        assert report.ok, str(report)


def _refusal(stages: int, mode: str) -> str:
    from tf_backend.errors import OptionRefused
    from tf_backend.model.options import check_engine_options
    from vllm.config import CompilationMode

    config = SimpleNamespace(
        quant_config=None,
        lora_config=None,
        speculative_config=None,
        additional_config={},
        weight_transfer_config=None,
        model_config=SimpleNamespace(enable_sleep_mode=False),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages, enable_expert_parallel=False),
        compilation_config=SimpleNamespace(mode=CompilationMode[mode]),
    )
    try:
        check_engine_options(config)
    except OptionRefused as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize(
    ("stages", "mode", "word"), [(2, "NONE", "only compiled"), (1, "NONE", ""), (2, "VLLM_COMPILE", "")]
)
def test_stages_on_the_cpu_need_compilation(stages: int, mode: str, word: str) -> None:
    warm()
    text = run_in_fork(_refusal, 120.0, stages, mode).value()
    assert word in text
    assert bool(word) == bool(text)
