"""The measurement: pairs of fresh processes, each row kept as it comes, continued where a file left off.

In: settings, a record, something that starts a process. Out: the record, fuller. A pair is started as a whole: one
that was interrupted begins again, since rows from different hours are no pair.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tf_tools.bench._errors import BenchError
from tf_tools.bench._record import Record
from tf_tools.bench._rows import Row
from tf_tools.bench._schedule import PRIME, Start, pair_starts, primes, slots
from tf_tools.bench._settings import Settings, code_digest


class Launch(Protocol):
    """Starts the processes of a pair and waits for them; never raises for what happens there. A row for each, in their order."""

    def __call__(
        self, settings: Settings, starts: Sequence[Start], attempt: int, caches: Path, timeout: float
    ) -> Iterable[Row]: ...


class Progress(Protocol):
    """Is told what happens."""

    def begins(self, starts: Sequence[Start]) -> None: ...
    def ended(self, row: Row) -> None: ...
    def skipped(self, count: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one call of `run_pairs`.

    Attributes:
        pairs: of each mode, those in the record among them.
        seconds: no pair begins that would end later, if it took as long as the longest so far; None for no limit.
        timeout: seconds for one process.
        retry: measure pairs with a failed start again.
    """

    pairs: int
    seconds: float | None = None
    timeout: float = 900.0
    retry: bool = False


def run_pairs(
    settings: Settings, record: Record, caches: Path, limits: Limits, launch: Launch, progress: Progress
) -> bool:
    """Measure what the record lacks; whether all pairs are there now (time may run out first).

    Raises:
        BenchError: the measured code changed meanwhile, or there are too few cores.
    """
    settings.check()
    if limits.pairs < 1:
        raise BenchError(f"{limits.pairs} pairs: at least one is needed, and six for an interval")
    clock = time.monotonic
    began, longest = clock(), _longest(settings, record)
    for mode, pair, starts in _blocks(settings, record, caches, limits):
        progress.skipped((1 if pair == PRIME else len(settings.arms)) - len(starts))
        if not starts:
            continue
        block_began = clock()
        if pair != PRIME and limits.seconds is not None and block_began - began + longest > limits.seconds:
            return False
        attempt = record.last_attempt(mode, pair) + 1
        _check_code(settings, record)
        progress.begins(starts)
        for row in launch(settings, starts, attempt, caches, limits.timeout):
            _check_code(settings, record)
            record.append(row)
            progress.ended(row)
        if pair != PRIME:
            longest = max(longest, clock() - block_began)
    return True


def _blocks(
    settings: Settings, record: Record, caches: Path, limits: Limits
) -> Iterator[tuple[str, int, tuple[Start, ...]]]:
    """Mode, pair and what must be started for it; the modes take turns, so that all get as far."""
    places = slots(sorted(os.sched_getaffinity(0)), settings.threads)
    for mode in settings.modes:
        for start in primes(mode, settings.arms, places):
            before = [row for row in record.rows if (row.mode, row.pair, row.arm) == (mode, PRIME, start.arm)]
            is_filled = any(row.ok for row in before) and (caches / start.arm).is_dir()
            is_given_up = bool(before) and not before[-1].ok and not limits.retry
            yield mode, PRIME, () if is_filled or is_given_up else (start,)
    for pair in range(limits.pairs):
        for mode in settings.modes:
            able = [arm for arm in settings.arms if _is_able(record, mode, arm)]
            # Without the first arm, or any other, there is no ratio.
            starts = pair_starts(mode, pair, able, places) if settings.arms[0] in able and len(able) > 1 else ()
            known = record.pair(mode, pair)
            is_done = set(able) <= set(known) and not (limits.retry and any(not row.ok for row in known.values()))
            yield mode, pair, () if is_done else starts


def _longest(settings: Settings, record: Record) -> float:
    """Seconds of the longest pair in the record."""
    pairs = [(mode, pair) for mode in settings.modes for pair in record.pairs(mode) if pair != PRIME]
    return max((sum(row.seconds for row in record.pair(*one).values()) for one in pairs), default=0.0)


def _is_able(record: Record, mode: str, arm: str) -> bool:
    """Whether the arm's last priming start went well: one that fails there fails always, and costs a start each time."""
    rows = [row for row in record.rows if (row.mode, row.pair, row.arm) == (mode, PRIME, arm)]
    return bool(rows) and rows[-1].ok


def _check_code(settings: Settings, record: Record) -> None:
    found = code_digest(settings.arms)
    if record.head.get("code") != found:
        raise BenchError(
            f"the measured code changed since the first start (digest {record.head.get('code')}, now {found}); "
            "measure from a checkout that nobody edits, and begin a new file"
        )
