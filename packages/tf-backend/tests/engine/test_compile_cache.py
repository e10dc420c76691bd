"""A warm compile cache never runs yesterday's rewrite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tf_tools.compare import Report, compare_run
from tf_tools.engine import ServeRequest, serve
from tf_tools.reference import reference_for
from tf_tools.sensitivity import probe_prompts

pytestmark = pytest.mark.engine


def double_the_product() -> None:
    """Make the gated MLP's rewrite another one, as an edit of its source would."""
    from ast_rewrite import Patch, SourceSpan
    from fx_match import Match, Trace
    from vllm_layers_bridge.fusions import GatedMLP

    rewrite = GatedMLP.rewrite

    def changed(self: GatedMLP, match: Match, trace: Trace, patch: Patch) -> None:
        rewrite(self, match, trace, patch)
        span = trace.span(match.root)
        assert span is not None
        product = SourceSpan(span.lineno, span.col, span.end_lineno, span.end_col)
        patch.replace(product, "2.0 * {product}", product=product)

    GatedMLP.rewrite = changed  # type: ignore[method-assign]


def start(
    folder: Path, environment: dict[str, str], setup: Callable[[], object] | None = None
) -> tuple[Report, tuple[int, int]]:
    """Serve compiled, in a process of its own: how it compares, and how many graphs were found and compiled."""
    request = ServeRequest(
        folder,
        prompts=probe_prompts(384, lengths=(5,)),
        max_tokens=2,
        enforce_eager=False,
        runs=1,
        cached=False,
        environment=environment,
        setup=setup,
        probe=graphs_found_and_compiled,
    )
    result = serve(request).require()
    (counts,) = result.probed
    assert isinstance(counts, tuple)
    return compare_run(reference_for(folder, result.runs[0]), result.runs[0]), counts


def graphs_found_and_compiled(model: object) -> tuple[int, int]:
    """Graphs that the compiler took from its cache in this process, and those it compiled."""
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    return inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]


def test_a_changed_rewrite_has_an_artifact_of_its_own(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder, ahead = checkpoint("llama"), {"VLLM_CACHE_ROOT": str(tmp_path), "VLLM_USE_AOT_COMPILE": "1"}

    def artifacts() -> set[str]:
        """Keys under which the engine keeps code that was compiled ahead of time."""
        return {path.name for path in tmp_path.rglob("torch_aot_compile/*")}

    first, _ = start(folder, ahead)
    assert first.ok, str(first)
    (key,) = artifacts()
    changed, _ = start(folder, ahead, double_the_product)
    assert changed.worst > 0.1, "the old code ran: a doubled MLP must change the answer"
    assert len(artifacts()) == 2, "another rewrite looked its code up under the key of the first"
    again, _ = start(folder, ahead)
    assert again.ok, str(again)
    assert len(artifacts() - {key}) == 1, "the first rewrite did not find its own key again"


def test_a_second_start_compiles_nothing_and_a_changed_rewrite_is_compiled(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = checkpoint("llama")
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "VLLM_CACHE_ROOT": str(tmp_path / "vllm")}
    first, (found, compiled) = start(folder, kept)
    assert first.ok, str(first)
    assert (found, compiled > 0) == (0, True)
    second, counts = start(folder, kept)
    assert second.ok, str(second)
    assert counts == (compiled, 0)
    changed, (_, compiled) = start(folder, kept, double_the_product)
    assert changed.worst > 0.1, "the old code ran: a doubled MLP must change the answer"
    assert compiled > 0
