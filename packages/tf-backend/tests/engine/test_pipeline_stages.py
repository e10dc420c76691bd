"""Two pipeline stages in two real processes give what transformers gives; what the engine lacks for them is told at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tf_tools.engine import warm
from tf_tools.fork import run_in_fork

pytestmark = pytest.mark.engine


def test_two_stages_compiled(assert_equal_on_two_ranks: Callable[..., None], checkpoint: Callable[[str], Path]) -> None:
    """Scaled embeddings and a tied head, in chunks: vLLM's CPU engine runs stages compiled alone."""
    assert_equal_on_two_ranks(checkpoint("gemma2"), eager=False, pipeline_parallel_size=2)


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
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages, enable_expert_parallel=False, enable_eplb=False),
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
