"""From rows to comparisons: for each pair the ratio of the first arm to another one, then a median and a verdict.

The ratio of a pair is the median over its rounds, in each of which both processes did the same run one after the other.

In: a record. Out: `Comparison` for each mode, workload, phase and arm, and `Cost` for what is not a workload. A pair in
which either process failed is left out of both, and counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tf_tools.bench._arms import parse_arm
from tf_tools.bench._errors import BenchError
from tf_tools.bench._record import Record
from tf_tools.bench._rows import CLOCKS, PHASES, Finished, Row
from tf_tools.bench._schedule import PRIME
from tf_tools.bench._statistics import FEWEST_PAIRS, Interval, median_interval

LOWER_BOUND = 0.97
HALF_WIDTH = 0.03


@dataclass(frozen=True, slots=True)
class Comparison:
    """Throughput of `first` over that of `other`; above 1, `first` is faster.

    Attributes:
        clock: "cpu" (tokens per CPU second) or "wall".
        first_rate, other_rate: medians over the processes, tokens per second; input tokens in the prefill, generated
            ones otherwise.
        lost: pairs without a ratio: a process failed.
    """

    mode: str
    concurrency: int
    phase: str
    clock: str
    first: str
    other: str
    first_rate: float
    other_rate: float
    ratio: Interval
    lost: int

    @property
    def is_same_kind(self) -> bool:
        """An A/A comparison: the true ratio is 1."""
        return parse_arm(self.first).kind == parse_arm(self.other).kind

    @property
    def passes(self) -> bool:
        """The lower bound is at least 0.97 and the half-width at most 3 %."""
        width = self.ratio.half_width
        return (
            self.ratio.low is not None and width is not None and self.ratio.low >= LOWER_BOUND and width <= HALF_WIDTH
        )

    @property
    def verdict(self) -> str:
        width = self.ratio.half_width
        if self.ratio.high is None or width is None:
            return f"needs {FEWEST_PAIRS} pairs"
        if self.is_same_kind:
            return "A/A too noisy" if width > HALF_WIDTH else "A/A agrees" if self.ratio.holds(1.0) else "A/A DIFFERS"
        if self.passes:
            return "pass"
        if self.ratio.high < LOWER_BOUND:
            return "slower"
        return "too noisy" if width > HALF_WIDTH else "undecided"


@dataclass(frozen=True, slots=True)
class Cost:
    """Something that is paid once per process; `ratio` is first over other, so that below 1 `first` is cheaper.

    Seconds, or bytes for memory. `cold` is that of the priming starts, which fill the caches; None where that is none.
    """

    mode: str
    name: str
    unit: str
    first: str
    other: str
    first_value: float
    other_value: float
    first_cold: float | None
    other_cold: float | None
    ratio: Interval


def comparisons(record: Record) -> tuple[Comparison, ...]:
    """All that the record allows, in the order of the settings; without a single whole pair there is no entry."""
    return tuple(
        found
        for mode, other in _sides(record)
        for concurrency in _numbers(record, "concurrency")
        for phase in PHASES
        for clock in CLOCKS
        if (found := _comparison(record, mode, other, concurrency, phase, clock)) is not None
    )


def costs(record: Record) -> tuple[Cost, ...]:
    """Loading, memory and time to first token."""
    return tuple(
        cost
        for mode, other in _sides(record)
        for name, unit, value in _costs_of(record)
        if (cost := _cost(record, mode, other, name, unit, value)) is not None
    )


def failures(record: Record) -> tuple[Row, ...]:
    """The failed rows of the latest attempts."""
    modes = dict.fromkeys(row.mode for row in record.rows)
    return tuple(
        row
        for mode in modes
        for pair in record.pairs(mode)
        for row in (_primes(record, mode) if pair == PRIME else record.pair(mode, pair)).values()
        if not row.ok
    )


def names(record: Record, field: str) -> tuple[str, ...]:
    """A list of strings in the head of the record. Raises `BenchError` if it is not there."""
    value = record.head.get(field)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise BenchError(f"{record.file}: expected a list of names under {field!r} in the head line, found {value!r}")
    return tuple(value)


def _numbers(record: Record, field: str) -> tuple[int, ...]:
    value = record.head.get(field)
    if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
        raise BenchError(f"{record.file}: expected a list of numbers under {field!r} in the head line, found {value!r}")
    return tuple(value)


def _sides(record: Record) -> Iterator[tuple[str, str]]:
    arms = names(record, "arms")
    return ((mode, other) for mode in names(record, "modes") for other in arms[1:])


def _results(record: Record, mode: str, other: str) -> tuple[list[tuple[Finished, Finished]], int]:
    """Both results of each whole pair, and the number of pairs that are not whole."""
    first = names(record, "arms")[0]
    whole, lost = [], 0
    for pair in record.pairs(mode):
        rows = record.pair(mode, pair)
        if pair == PRIME or not {first, other} & set(rows):
            continue
        a, b = (rows[name].result if name in rows else None for name in (first, other))
        if a is None or b is None:
            lost += 1
        else:
            whole.append((a, b))
    return whole, lost


def _comparison(record: Record, mode: str, other: str, concurrency: int, phase: str, clock: str) -> Comparison | None:
    results, lost = _results(record, mode, other)
    ratios, first_rates, other_rates = [], [], []
    for pair in results:
        measures = [one.measure(concurrency) for one in pair]
        if None in measures:
            raise BenchError(f"{record.file}: a row lacks the workload of {concurrency} requests; the file was changed")
        a, b = (measure for measure in measures if measure is not None)
        tokens = a.tokens(phase)
        if tokens != b.tokens(phase):
            raise BenchError(
                f"{record.file}: {tokens} tokens in the {phase} phase of one arm, {b.tokens(phase)} in the "
                "other: the engines scheduled the same requests differently, and their times cannot be compared"
            )
        rounds = tuple(zip(a.runs(phase, clock), b.runs(phase, clock), strict=True))
        if not rounds:
            return None
        # Round by round: the two runs of one round lie seconds apart, and the machine is another one a minute later.
        ratios.append(statistics.median(b / a for a, b in rounds))
        first_rates.append(tokens / statistics.median(a for a, _ in rounds))
        other_rates.append(tokens / statistics.median(b for _, b in rounds))
    if not first_rates:
        return None
    return Comparison(
        mode=mode,
        concurrency=concurrency,
        phase=phase,
        clock=clock,
        first=names(record, "arms")[0],
        other=other,
        first_rate=statistics.median(first_rates),
        other_rate=statistics.median(other_rates),
        ratio=median_interval(ratios),
        lost=lost,
    )


_Value = Callable[[Finished], float | None]


def _costs_of(record: Record) -> Sequence[tuple[str, str, _Value]]:
    lowest = min(_numbers(record, "concurrency"))

    def first_token(result: Finished) -> float | None:
        measure = result.measure(lowest)
        return None if measure is None else measure.seconds("prefill", "wall")

    return (
        ("import, CPU", "s", lambda result: result.import_cpu),
        ("load, wall", "s", lambda result: result.load_wall),
        ("load, CPU", "s", lambda result: result.load_cpu),
        ("memory, loaded", "bytes", lambda result: float(result.loaded_rss)),
        ("memory, peak", "bytes", lambda result: float(result.peak_rss)),
        (f"first token at {lowest}", "s", first_token),
    )


def _cost(record: Record, mode: str, other: str, name: str, unit: str, value: _Value) -> Cost | None:
    pairs = [(value(a), value(b)) for a, b in _results(record, mode, other)[0]]
    known = [(a, b) for a, b in pairs if a and b]
    if not known:
        return None
    first = names(record, "arms")[0]
    primed = _primes(record, mode)
    cold = [
        None if (row := primed.get(arm)) is None or row.result is None else value(row.result) for arm in (first, other)
    ]
    return Cost(
        mode=mode,
        name=name,
        unit=unit,
        first=first,
        other=other,
        first_value=statistics.median(a for a, _ in known),
        other_value=statistics.median(b for _, b in known),
        first_cold=cold[0],
        other_cold=cold[1],
        ratio=median_interval([a / b for a, b in known]),
    )


def _primes(record: Record, mode: str) -> dict[str, Row]:
    """The last priming start of each arm."""
    return {row.arm: row for row in record.rows if (row.mode, row.pair) == (mode, PRIME)}
