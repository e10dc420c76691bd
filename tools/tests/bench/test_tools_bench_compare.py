"""Comparisons, verdicts and the report, from rows with a known ratio."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tf_tools.bench import (
    BenchError,
    Comparison,
    Interval,
    Limits,
    Record,
    Row,
    Settings,
    comparisons,
    costs,
    failures,
    fingerprint,
    open_record,
    run_pairs,
)
from tf_tools.bench._report import print_report

MakeRow = Callable[..., Row]
Measured = Callable[..., Record]


@pytest.fixture
def measured(settings: Settings, fake_launch: Any, progress: Any, tmp_path: Path) -> Measured:
    """A record of nine pairs of ours, in-tree and ours2."""

    def get(times: dict[str, float], noise: float = 0.003, pairs: int = 9, **launch: Any) -> Record:
        three = replace(settings, arms=("ours", "in-tree", "ours2"), concurrency=(1, 8))
        record = open_record(tmp_path / "three.jsonl", fingerprint(three))
        run_pairs(three, record, tmp_path / "caches", Limits(pairs), fake_launch(times, noise, **launch), progress)
        return record

    return get


def _printed(record: Record, clock: str = "cpu") -> str:
    console = Console(file=StringIO(), width=220)
    print_report(console, record, clock=clock)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def _of(record: Record, other: str) -> list[Comparison]:
    return [one for one in comparisons(record) if one.other == other and one.clock == "cpu"]


def test_a_faster_first_arm_has_a_ratio_above_one(measured: Measured) -> None:
    """In-tree takes 1.25 times as long: 1.25 times the throughput for ours."""
    record = measured({"in-tree": 1.25})
    found = _of(record, "in-tree")
    assert [(one.concurrency, one.phase) for one in found] == [
        (c, p) for c in (1, 8) for p in ("all", "prefill", "decode")
    ]
    for one in found:
        assert one.ratio.median == pytest.approx(1.25, rel=0.01)
        assert one.first_rate / one.other_rate == pytest.approx(1.25, rel=0.01)
        assert one.verdict == "pass"
    assert found[0].other_rate == pytest.approx(32 / 1.25, rel=0.01)


def test_runs_are_compared_with_the_runs_of_their_round(record: Record, make_row: MakeRow) -> None:
    """The machine slows to a third, and one run is disturbed: of each round the ratio is 1.1, of the medians 1.65."""
    for arm, seconds in (("native", (1.0, 2.0, 3.0)), ("native2", (1.1, 9.0, 3.3))):
        row = make_row(arm, 0)
        assert row.result is not None
        measure = replace(row.result.measures[0], prefill_cpu=seconds, decode_cpu=seconds)
        record.append(replace(row, result=replace(row.result, measures=(measure,))))
    (whole,) = [one for one in _of(record, "native2") if one.phase == "all"]
    assert whole.ratio.median == pytest.approx(1.1)
    assert whole.first_rate / whole.other_rate == pytest.approx(1.65)


def test_identical_arms_agree(measured: Measured) -> None:
    for one in _of(measured({}), "ours2"):
        assert one.is_same_kind
        assert one.verdict == "A/A agrees"
        assert one.ratio.median == pytest.approx(1.0, abs=0.005)


@pytest.mark.parametrize(
    ("times", "noise", "verdict"),
    [
        ({"in-tree": 0.9}, 0.003, "slower"),
        ({"in-tree": 0.97}, 0.003, "undecided"),
        ({"in-tree": 1.0}, 0.15, "too noisy"),
        ({"in-tree": 0.985}, 0.003, "pass"),
    ],
)
def test_verdicts(measured: Measured, times: dict[str, float], noise: float, verdict: str) -> None:
    assert {one.verdict for one in _of(measured(times, noise), "in-tree")} == {verdict}


@pytest.mark.parametrize(
    ("ratio", "other", "verdict", "passes"),
    [
        (Interval(1.0, 0.97, 1.029, 9), "in-tree", "pass", True),
        (Interval(1.0, 0.969, 1.0, 9), "in-tree", "undecided", False),
        (Interval(1.05, 1.01, 1.09, 9), "in-tree", "too noisy", False),
        (Interval(0.9, 0.85, 0.969, 9), "in-tree", "slower", False),
        (Interval(1.02, 1.01, 1.03, 9), "ours2", "A/A DIFFERS", True),
        (Interval(1.0, 0.95, 1.05, 9), "ours2", "A/A too noisy", False),
        (Interval(1.0, None, None, 3), "in-tree", "needs 6 pairs", False),
    ],
)
def test_the_bounds_of_a_verdict(ratio: Interval, other: str, verdict: str, passes: bool) -> None:
    one = Comparison("eager", 1, "all", "cpu", "ours", other, 1.0, 1.0, ratio, 0)
    assert one.verdict == verdict
    assert one.passes == passes


def test_a_pair_with_a_failure_counts_for_no_median(measured: Measured) -> None:
    record = measured({}, failing={("eager", 4, "in-tree")})
    assert {(one.ratio.pairs, one.lost) for one in _of(record, "in-tree")} == {(8, 1)}
    assert {(one.ratio.pairs, one.lost) for one in _of(record, "ours2")} == {(9, 0)}
    (failed,) = failures(record)
    assert (failed.pair, failed.arm) == (4, "in-tree")
    assert "eager, pair 4, in-tree: it broke" in _printed(record)


def test_costs_are_cheaper_below_one_and_the_first_start_is_cold(measured: Measured) -> None:
    found = {(one.other, one.name): one for one in costs(measured({"ours": 0.5, "ours2": 0.5}))}
    load = found["in-tree", "load, wall"]
    assert load.ratio.median == pytest.approx(0.5, rel=0.01)
    assert load.first_value == pytest.approx(1.0, rel=0.01)
    assert load.first_cold == pytest.approx(1.0, rel=0.02)
    assert load.other_cold == pytest.approx(2.0, rel=0.02)
    assert found["in-tree", "memory, peak"].ratio.median == 1.0
    first_token = found["in-tree", "first token at 1"]
    assert first_token.first_value == pytest.approx(0.05, rel=0.01)
    assert first_token.first_cold is None


def test_another_number_of_decode_tokens_is_no_comparison(record: Record, make_row: MakeRow) -> None:
    record.append(make_row("native", 0))
    record.append(make_row("native2", 0, decode_tokens=30))
    with pytest.raises(BenchError, match="scheduled the same requests differently"):
        comparisons(record)


def test_a_row_without_a_workload_is_refused(record: Record, make_row: MakeRow) -> None:
    record.append(make_row("native", 0))
    record.append(make_row("native2", 0, concurrency=(8,)))
    with pytest.raises(BenchError, match="lacks the workload of 1 requests"):
        comparisons(record)


def test_a_head_without_arms_is_refused(record: Record, make_row: MakeRow) -> None:
    record.append(make_row("native", 0))
    record.head["arms"] = "native"
    with pytest.raises(BenchError, match="list of names under 'arms'"):
        comparisons(record)


def test_the_report_shows_ratios_verdicts_and_conditions(measured: Measured) -> None:
    text = _printed(measured({"in-tree": 1.25}))
    assert "ours / in-tree" in text
    assert "A/A agrees" in text
    assert "pass" in text
    assert "GiB" in text
    assert "64 tokens in and 32 out" in text
    assert "torch" in text
    assert "waited for its core" not in text


def test_the_report_goes_by_the_clock_asked_for(record: Record, make_row: MakeRow) -> None:
    """Equal in CPU time; native takes twice the wall time, which makes it the slower one on that clock alone."""
    for pair in range(6):
        record.append(make_row("native", pair, cpu=1.0, wall=2.0))
        record.append(make_row("native2", pair, cpu=1.0, wall=1.0))
    by_clock = {one.clock: one.ratio.median for one in comparisons(record) if one.phase == "all"}
    assert by_clock == {"cpu": 1.0, "wall": 0.5}
    assert "A/A agrees" in _printed(record)
    assert "A/A DIFFERS" in _printed(record, "wall")
    assert "waited for its core (2.00 wall seconds" in _printed(record)


def test_a_noisy_machine_is_told(measured: Measured) -> None:
    text = _printed(measured({}, noise=0.2))
    assert "A/A too noisy in eager, 1 request(s), all" in text
    assert "no smaller difference means anything" in text


def test_a_report_before_the_first_pair_says_so(record: Record, make_row: MakeRow) -> None:
    assert comparisons(record) == ()
    assert costs(record) == ()
    assert "No pair is complete yet" in _printed(record)
    record.append(make_row("native", -1, failure="refused: no such layer"))
    text = _printed(record)
    assert "first start, native: refused: no such layer" in text
    assert "--retry" in text


def test_few_pairs_have_no_verdict(measured: Measured) -> None:
    assert "needs 6 pairs" in _printed(measured({}, pairs=2))
    assert "pass " not in _printed(measured({}, pairs=2))
