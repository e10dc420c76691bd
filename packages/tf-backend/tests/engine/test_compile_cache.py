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


def test_a_changed_rewrite_runs_on_a_warm_start(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("llama")

    def start(setup: Callable[[], object] | None) -> Report:
        request = ServeRequest(
            folder,
            prompts=probe_prompts(384, lengths=(5,)),
            max_tokens=2,
            enforce_eager=False,
            runs=1,
            cached=False,
            environment={"VLLM_CACHE_ROOT": str(tmp_path), "VLLM_USE_AOT_COMPILE": "1"},
            setup=setup,
        )
        (run,) = serve(request).require().runs
        return compare_run(reference_for(folder, run), run)

    def artifacts() -> set[str]:
        """Keys under which the engine keeps code that was compiled ahead of time."""
        return {path.name for path in tmp_path.rglob("torch_aot_compile/*")}

    first = start(None)
    assert first.ok, str(first)
    (key,) = artifacts()
    changed = start(double_the_product)
    assert changed.worst > 0.1, "the old code ran: a doubled MLP must change the answer"
    assert len(artifacts()) == 2, "another rewrite looked its code up under the key of the first"
    again = start(None)
    assert again.ok, str(again)
    assert len(artifacts() - {key}) == 1, "the first rewrite did not find its own key again"


def test_a_second_start_compiles_nothing(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("llama")

    def start() -> tuple[int, int]:
        request = ServeRequest(
            folder,
            prompts=probe_prompts(384, lengths=(5,)),
            max_tokens=2,
            enforce_eager=False,
            runs=1,
            cached=False,
            environment={
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
                "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
            },
            probe=graphs_found_and_compiled,
        )
        result = serve(request).require()
        assert compare_run(reference_for(folder, result.runs[0]), result.runs[0]).ok
        (counts,) = result.probed
        assert isinstance(counts, tuple)
        return counts

    found, compiled = start()
    assert found == 0
    assert compiled > 0
    assert start() == (compiled, 0)


def graphs_found_and_compiled(model: object) -> tuple[int, int]:
    """Graphs that the compiler took from its cache in this process, and those it compiled."""
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    return inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]
