"""Rows without an engine: processes whose times are drawn, with a known ratio between the arms."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tf_tools.bench import Finished, Measure, Record, Row, Settings, Start, fingerprint, open_record

MakeRow = Callable[..., Row]


def _row(
    arm: str,
    pair: int,
    *,
    mode: str = "eager",
    attempt: int = 1,
    cpu: float = 1.0,
    wall: float | None = None,
    failure: str = "",
    repeats: int = 3,
    concurrency: tuple[int, ...] = (1,),
    decode_tokens: int = 31,
) -> Row:
    """A row whose whole run takes `cpu` seconds, a tenth of them in the prefill."""
    wall = cpu if wall is None else wall
    measures = tuple(
        Measure(
            n,
            64 * n,
            32 * n,
            decode_tokens * n,
            (wall * 0.1,) * repeats,
            (cpu * 0.1,) * repeats,
            (wall * 0.9,) * repeats,
            (cpu * 0.9,) * repeats,
        )
        for n in concurrency
    )
    result = Finished("some.Model", 5.0, 4.0, cpu * 2, cpu, 2**30, 2**31, measures)
    return Row(mode, pair, attempt, arm, 0, (0,), 0.5, 9.0, failure, None if failure else result)


@pytest.fixture
def make_row() -> MakeRow:
    return _row


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return Settings(folder, arms=("native", "native2"), concurrency=(1,))


@pytest.fixture
def record(settings: Settings, tmp_path: Path) -> Record:
    return open_record(tmp_path / "results.jsonl", fingerprint(settings))


@dataclass
class FakeLaunch:
    """Starts nothing; keeps what was asked for. An arm's whole run takes its entry in `times`, with noise.

    Attributes:
        failing: (mode, pair, arm) of the processes that fail.
        stop_after: raise KeyboardInterrupt instead of the start with this number.
    """

    times: Mapping[str, float] = field(default_factory=dict)
    noise: float = 0.0
    failing: set[tuple[str, int, str]] = field(default_factory=set)
    stop_after: int | None = None
    started: list[Start] = field(default_factory=list)

    def __call__(
        self, settings: Settings, starts: Sequence[Start], attempt: int, caches: Path, timeout: float
    ) -> Iterator[Row]:
        for start in starts:
            yield self._launch(settings, start, attempt, caches)

    def _launch(self, settings: Settings, start: Start, attempt: int, caches: Path) -> Row:
        if self.stop_after is not None and len(self.started) >= self.stop_after:
            raise KeyboardInterrupt
        self.started.append(start)
        (caches / start.arm).mkdir(parents=True, exist_ok=True)
        draw = random.Random(f"{start}")
        row = _row(
            start.arm,
            start.pair,
            mode=start.mode,
            attempt=attempt,
            cpu=self.times.get(start.arm, 1.0) * draw.gauss(1.0, self.noise),
            failure="it broke" if (start.mode, start.pair, start.arm) in self.failing else "",
            repeats=0 if start.pair < 0 else settings.repeats,
            concurrency=settings.concurrency,
        )
        return replace(row, position=start.position, cores=start.cores)


@pytest.fixture
def fake_launch() -> type[FakeLaunch]:
    return FakeLaunch


class SilentProgress:
    """Counts the steps of a bar."""

    def __init__(self) -> None:
        self.steps = 0

    def begins(self, starts: Sequence[Start]) -> None:
        pass

    def ended(self, row: Row) -> None:
        self.steps += 1

    def skipped(self, count: int) -> None:
        self.steps += count


@pytest.fixture
def progress() -> SilentProgress:
    return SilentProgress()
