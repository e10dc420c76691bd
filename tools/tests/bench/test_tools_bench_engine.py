"""One pair on the real engine: each arm is served by what it is named for, and everything is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tf_tools.bench import Limits, Settings, Start, comparisons, costs, fingerprint, launch, open_record, run_pairs

pytestmark = pytest.mark.engine


def _settings(folder: Path) -> Settings:
    return Settings(
        folder,
        arms=("ours", "in-tree"),
        concurrency=(1, 3),
        dtype="float32",
        input_tokens=16,
        output_tokens=4,
        repeats=2,
    )


def test_a_pair_is_measured(checkpoint: Callable[[str], Path], progress: object, tmp_path: Path) -> None:
    settings = _settings(checkpoint("llama"))
    record = open_record(tmp_path / "results.jsonl", fingerprint(settings))
    run_pairs(settings, record, tmp_path / "caches", Limits(1), launch, progress)  # type: ignore[arg-type]
    assert [row.failure for row in record.rows] == [""] * 4
    for row in record.rows:
        assert row.result is not None
        prefix = "tf_backend." if row.arm == "ours" else "vllm.model_executor.models.transformers."
        assert row.result.served_by.startswith(prefix)
        assert row.result.peak_rss >= row.result.loaded_rss > 10**8
        assert min(row.result.load_wall, row.result.load_cpu, row.result.import_wall, row.result.import_cpu) > 0
    ours = record.pair("eager", 0)["ours"].result
    assert ours is not None
    for measure, requests in zip(ours.measures, (1, 3), strict=True):
        assert (measure.input_tokens, measure.output_tokens) == (16 * requests, 4 * requests)
        assert measure.decode_tokens == 3 * requests  # the first step is the whole prefill
        assert len(measure.prefill_cpu) == 2
        assert min(measure.prefill_cpu + measure.decode_cpu + measure.prefill_wall + measure.decode_wall) > 0
    assert len(comparisons(record)) == 2 * 3 * 2
    assert {cost.name for cost in costs(record)} >= {"load, wall", "memory, peak", "first token at 1"}


def test_a_model_that_cannot_be_loaded_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["NoSuchModel"]}')
    (row,) = launch(_settings(tmp_path), [Start("eager", 0, "in-tree", 0, (0,))], 1, tmp_path / "caches", 300.0)
    assert row.result is None
    assert "Error" in row.failure
