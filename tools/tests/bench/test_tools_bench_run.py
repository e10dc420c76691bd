"""Pairs are measured in turn, continued as wholes, and given up where they cannot lead anywhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tf_tools.bench import BenchError, Limits, Record, Row, Settings, fingerprint, open_record, run_pairs

MakeRow = Callable[..., Row]
PAIRS = Limits(pairs=3)


def _order(launch: Any) -> list[tuple[str, int, str]]:
    return [(start.mode, start.pair, start.arm) for start in launch.started]


def test_first_starts_come_first_and_orders_turn(
    settings: Settings, record: Record, fake_launch: Any, progress: Any, tmp_path: Path
) -> None:
    launch = fake_launch()
    assert run_pairs(settings, record, tmp_path / "caches", PAIRS, launch, progress)
    arms = ["native", "native2"] * 2 + ["native2", "native"] + ["native", "native2"]
    assert [start.arm for start in launch.started] == arms
    assert [start.pair for start in launch.started] == [-1, -1, 0, 0, 1, 1, 2, 2]
    assert progress.steps == 8


def test_modes_take_turns(settings: Settings, fake_launch: Any, progress: Any, tmp_path: Path) -> None:
    both = replace(settings, modes=("eager", "compiled"))
    launch = fake_launch()
    record = open_record(tmp_path / "both.jsonl", fingerprint(both))
    run_pairs(both, record, tmp_path / "caches", Limits(pairs=2), launch, progress)
    assert [(mode, pair) for mode, pair, arm in _order(launch)[4::2]] == [
        ("eager", 0),
        ("compiled", 0),
        ("eager", 1),
        ("compiled", 1),
    ]


def test_nothing_is_measured_twice(
    settings: Settings, record: Record, fake_launch: Any, progress: Any, tmp_path: Path
) -> None:
    run_pairs(settings, record, tmp_path / "caches", PAIRS, fake_launch(), progress)
    again = fake_launch()
    reopened = open_record(record.file, fingerprint(settings))
    assert run_pairs(settings, reopened, tmp_path / "caches", PAIRS, again, progress)
    assert again.started == []
    assert progress.steps == 16
    assert run_pairs(settings, reopened, tmp_path / "caches", Limits(pairs=4), again, progress)
    assert {start.pair for start in again.started} == {3}


def test_an_interrupted_pair_begins_again(
    settings: Settings, record: Record, fake_launch: Any, progress: Any, tmp_path: Path
) -> None:
    """Killed after the first process of pair 1: the row stays in the file, and belongs to no pair."""
    with pytest.raises(KeyboardInterrupt):
        run_pairs(settings, record, tmp_path / "caches", PAIRS, fake_launch(stop_after=5), progress)
    reopened = open_record(record.file, fingerprint(settings))
    again = fake_launch()
    run_pairs(settings, reopened, tmp_path / "caches", PAIRS, again, progress)
    assert _order(again)[:2] == [("eager", 1, "native2"), ("eager", 1, "native")]
    assert {row.attempt for row in reopened.pair("eager", 1).values()} == {2}
    assert len(reopened.pair("eager", 1)) == 2
    assert sum(row.pair == 1 for row in reopened.rows) == 3


def test_a_failed_process_is_a_row_and_is_not_repeated_unasked(
    settings: Settings, record: Record, fake_launch: Any, progress: Any, tmp_path: Path
) -> None:
    broken = fake_launch(failing={("eager", 1, "native2")})
    assert run_pairs(settings, record, tmp_path / "caches", PAIRS, broken, progress)
    assert not record.pair("eager", 1)["native2"].ok
    assert len(broken.started) == 8
    again = fake_launch()
    run_pairs(settings, record, tmp_path / "caches", PAIRS, again, progress)
    assert again.started == []
    run_pairs(settings, record, tmp_path / "caches", replace(PAIRS, retry=True), again, progress)
    assert _order(again) == [("eager", 1, "native2"), ("eager", 1, "native")]
    assert all(row.ok for row in record.pair("eager", 1).values())


def test_an_arm_that_fails_its_first_start_is_left_out(
    settings: Settings, fake_launch: Any, progress: Any, tmp_path: Path
) -> None:
    three = replace(settings, arms=("native", "in-tree", "native2"))
    record = open_record(tmp_path / "three.jsonl", fingerprint(three))
    launch = fake_launch(failing={("eager", -1, "in-tree")})
    run_pairs(three, record, tmp_path / "caches", PAIRS, launch, progress)
    assert [arm for _, pair, arm in _order(launch) if pair >= 0].count("in-tree") == 0
    assert len(launch.started) == 3 + 6
    assert progress.steps == 12
    again = fake_launch()
    run_pairs(three, record, tmp_path / "caches", PAIRS, again, progress)
    assert again.started == []
    run_pairs(three, record, tmp_path / "caches", replace(PAIRS, retry=True), again, progress)
    assert _order(again)[0] == ("eager", -1, "in-tree")
    assert len(again.started) == 1 + 9


@pytest.mark.parametrize("failing", [{"native"}, {"in-tree", "native2"}])
def test_without_a_ratio_no_pair_is_started(
    settings: Settings, fake_launch: Any, progress: Any, tmp_path: Path, failing: set[str]
) -> None:
    three = replace(settings, arms=("native", "in-tree", "native2"))
    record = open_record(tmp_path / "three.jsonl", fingerprint(three))
    launch = fake_launch(failing={("eager", -1, arm) for arm in failing})
    run_pairs(three, record, tmp_path / "caches", PAIRS, launch, progress)
    assert {start.pair for start in launch.started} == {-1}
    assert progress.steps == 12


def test_caches_that_are_gone_are_filled_again(
    settings: Settings, record: Record, fake_launch: Any, progress: Any, tmp_path: Path
) -> None:
    """Otherwise the first pair would measure a cold start of one arm."""
    run_pairs(settings, record, tmp_path / "caches", Limits(pairs=1), fake_launch(), progress)
    shutil.rmtree(tmp_path / "caches" / "native2")
    again = fake_launch()
    run_pairs(settings, record, tmp_path / "caches", Limits(pairs=2), again, progress)
    assert _order(again)[0] == ("eager", -1, "native2")
    assert len(again.started) == 3


def test_no_pair_begins_that_would_end_too_late(
    settings: Settings,
    record: Record,
    fake_launch: Any,
    progress: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten seconds a process on a clock of the test: first starts 20 s, then pairs of 20 s; 65 s hold two of them."""
    launch = fake_launch()
    monkeypatch.setattr("tf_tools.bench._run.time.monotonic", lambda: 10.0 * len(launch.started))
    limited = replace(PAIRS, seconds=65.0)
    assert not run_pairs(settings, record, tmp_path / "caches", limited, launch, progress)
    assert record.pairs("eager") == (-1, 0, 1)
    short = replace(PAIRS, seconds=17.0)  # pairs of the record took 18
    assert not run_pairs(settings, record, tmp_path / "caches", short, launch, progress)
    assert run_pairs(settings, record, tmp_path / "caches", limited, launch, progress)
    assert record.pairs("eager") == (-1, 0, 1, 2)


def test_code_that_changes_meanwhile_ends_the_measurement(
    settings: Settings,
    record: Record,
    fake_launch: Any,
    progress: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch = fake_launch()
    before = record.head["code"]
    monkeypatch.setattr(
        "tf_tools.bench._run.code_digest", lambda arms: before if len(launch.started) < 3 else "changed"
    )
    with pytest.raises(BenchError, match="changed since the first start"):
        run_pairs(settings, record, tmp_path / "caches", PAIRS, launch, progress)
    assert len(record.rows) == 2, "what was measured while it changed is no row"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"modes": ("lazy",)}, "eager, compiled"),
        ({"modes": ()}, "modes none"),
        ({"modes": ("eager", "eager")}, "at most once"),
        ({"concurrency": ()}, "concurrency"),
        ({"concurrency": (1, 1)}, "each once"),
        ({"output_tokens": 0}, "must be positive"),
        ({"arms": ("native",)}, "nothing to be compared"),
        ({"threads": 10_000}, "10000 threads"),
        ({"model": Path("absent")}, "no config.json"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_start(
    settings: Settings,
    record: Record,
    fake_launch: Any,
    progress: Any,
    tmp_path: Path,
    change: dict[str, Any],
    words: str,
) -> None:
    launch = fake_launch()
    with pytest.raises(BenchError, match=words):
        run_pairs(replace(settings, **change), record, tmp_path / "caches", PAIRS, launch, progress)
    assert launch.started == []


def test_no_pairs_are_refused(
    settings: Settings, record: Record, fake_launch: Any, progress: Any, tmp_path: Path
) -> None:
    with pytest.raises(BenchError, match="0 pairs"):
        run_pairs(settings, record, tmp_path / "caches", Limits(pairs=0), fake_launch(), progress)
