"""Served models equal transformers over the whole vocabulary: prefill, decode, chunked prefill, prefix cache, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from tf_tools.compare import compare_run
from tf_tools.engine import ServeRequest, ServeResult, serve
from tf_tools.reference import reference_for
from tf_tools.sensitivity import probe_prompts

pytestmark = pytest.mark.engine

REQUIRED = ("llama", "qwen2", "qwen3", "mistral", "smollm3")
BESIDE = ("llama-tied", "llama-biased", "qwen2-sliding", "gemma2")
CHUNKED = {"max_num_batched_tokens": 32}


def fused_classes(model: torch.nn.Module) -> dict[str, int]:
    """Instances by class of what stands in the served model, vLLM layers and rewritten classes."""
    counts: dict[str, int] = {}
    for module in model.modules():
        kind = type(module)
        name = f"{kind.__module__.split('.')[0]}:{kind.__name__}"
        counts[name] = counts.get(name, 0) + 1
    return counts


def served(folder: Path, *, eager: bool = True, kwargs: Mapping[str, object] | None = None) -> ServeResult:
    request = ServeRequest(
        folder,
        prompts=probe_prompts(384),
        enforce_eager=eager,
        llm_kwargs=kwargs or {},
        probe=fused_classes,
    )
    return serve(request).require()


def assert_equal(folder: Path, result: ServeResult) -> None:
    assert len(result.runs) == 3
    for run in result.runs:
        report = compare_run(reference_for(folder, run), run)
        assert report.ok, str(report)


@pytest.mark.parametrize("name", [*REQUIRED, *BESIDE])
def test_equal_eager_with_chunked_prefill(name: str, checkpoint: Callable[[str], Path]) -> None:
    assert_equal(checkpoint(name), served(checkpoint(name), kwargs=CHUNKED))


@pytest.mark.parametrize("name", REQUIRED)
def test_equal_eager_with_whole_prefill(name: str, checkpoint: Callable[[str], Path]) -> None:
    result = served(checkpoint(name))
    assert_equal(checkpoint(name), result)
    (counts,) = result.probed
    assert isinstance(counts, dict)
    layers = counts["vllm:Attention"]
    assert counts["vllm:QKVParallelLinear"] == counts["vllm:MergedColumnParallelLinear"] == layers
    assert counts["vllm_layers_bridge:KernelRMSNorm"] == layers * (4 if name == "qwen3" else 2) + 1
    assert not any(key.startswith("torch:Linear") for key in counts)


@pytest.mark.parametrize("name", REQUIRED)
def test_equal_compiled(name: str, checkpoint: Callable[[str], Path]) -> None:
    assert_equal(checkpoint(name), served(checkpoint(name), eager=False, kwargs=CHUNKED))
