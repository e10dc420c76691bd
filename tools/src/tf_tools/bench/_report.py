"""The report: throughput with verdicts, costs, and all that a reader must know to trust them.

In: a record. Out: tables on a console.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from tf_tools.bench._compare import HALF_WIDTH, LOWER_BOUND, Comparison, Cost, comparisons, costs, failures
from tf_tools.bench._record import Record
from tf_tools.bench._rows import CLOCKS
from tf_tools.bench._schedule import PRIME
from tf_tools.bench._statistics import Interval

_BUSY = 1.1
"""Wall over CPU seconds on one thread: beyond, the process waited for its core."""
_GIB = 2**30
_COLOURS = {"pass": "green", "A/A agrees": "green", "slower": "red", "A/A DIFFERS": "red"}


def print_report(console: Console, record: Record, *, clock: str = "cpu") -> None:
    """Print everything; `clock` ("cpu" or "wall") is the one that verdicts go by.

    Raises:
        BenchError: the record lacks what a report needs.
    """
    found = comparisons(record)
    console.print(_heading(record), soft_wrap=True, markup=False)
    if found:
        console.print(_throughput(found, clock))
        console.print(_costs(costs(record)))
    else:
        console.print("No pair is complete yet.")
    for note in _notes(record, found, clock):
        console.print(f"- {note}", markup=False, highlight=False, soft_wrap=True)


def _heading(record: Record) -> str:
    head = record.head
    versions = head.get("versions")
    listed = ", ".join(f"{name} {value}" for name, value in versions.items()) if isinstance(versions, dict) else "?"
    return (
        f"{head.get('model')} ({head.get('checkpoint')}), {head.get('dtype')}, {head.get('input_tokens')} tokens in and "
        f"{head.get('output_tokens')} out, {head.get('repeats')} repeats in each process, {head.get('threads')} thread(s)\n"
        f"{head.get('machine')}; {listed}; code {head.get('code')}"
    )


def _throughput(found: tuple[Comparison, ...], clock: str) -> Table:
    second = CLOCKS[1 - CLOCKS.index(clock)]
    table = Table(title=f"Tokens per {clock} second; ratio above 1: the first arm is faster", title_justify="left")
    for name in ("mode", "requests", "phase", "arms"):
        table.add_column(name)
    for name in ("first", "other", "ratio", "95 %", "±", "pairs", f"{second} ratio", f"{second} 95 %"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    group = None
    others = {_key(one): one for one in found if one.clock == second}
    for one in (one for one in found if one.clock == clock):
        if group not in (None, (one.mode, one.other)):
            table.add_section()
        group = (one.mode, one.other)
        beside = others[_key(one)].ratio
        colour = _COLOURS.get(one.verdict, "yellow")
        table.add_row(
            one.mode,
            str(one.concurrency),
            one.phase,
            f"{one.first} / {one.other}",
            f"{one.first_rate:.1f}",
            f"{one.other_rate:.1f}",
            f"{one.ratio.median:.3f}",
            _range(one.ratio),
            _width(one.ratio),
            f"{one.ratio.pairs}" + (f" (-{one.lost})" if one.lost else ""),
            f"{beside.median:.3f}",
            _range(beside),
            f"[{colour}]{one.verdict}[/{colour}]",
        )
    return table


def _costs(found: tuple[Cost, ...]) -> Table:
    table = Table(title="Costs of a process; ratio below 1: the first arm is cheaper", title_justify="left")
    for name in ("mode", "cost", "arms"):
        table.add_column(name)
    for name in ("first", "other", "ratio", "95 %", "first, cold", "other, cold"):
        table.add_column(name, justify="right")
    group = None
    for one in found:
        if group not in (None, (one.mode, one.other)):
            table.add_section()
        group = (one.mode, one.other)
        table.add_row(
            one.mode,
            one.name,
            f"{one.first} / {one.other}",
            _amount(one.first_value, one.unit),
            _amount(one.other_value, one.unit),
            f"{one.ratio.median:.3f}",
            _range(one.ratio),
            _amount(one.first_cold, one.unit),
            _amount(one.other_cold, one.unit),
        )
    return table


def _notes(record: Record, found: tuple[Comparison, ...], clock: str) -> Iterator[str]:
    yield (
        f"pass: the lower bound is at least {LOWER_BOUND} and the half-width at most {HALF_WIDTH:.0%}. slower: the whole "
        "interval lies below. Ratios are medians over pairs of processes, intervals are bootstrapped."
    )
    doubted = [one for one in found if one.clock == clock and one.verdict in ("A/A DIFFERS", "A/A too noisy")]
    for one in doubted:
        yield (
            f"{one.verdict} in {one.mode}, {one.concurrency} request(s), {one.phase}: two engines of one kind give "
            f"{one.ratio.median:.3f} ({_range(one.ratio)}); no smaller difference means anything there"
        )
    busy = _waiting(record)
    if busy > _BUSY:
        yield f"a process waited for its core ({busy:.2f} wall seconds for one CPU second): wall ratios are not to be used"
    for row in failures(record):
        where = "first start" if row.pair == PRIME else f"pair {row.pair}"
        yield f"{row.mode}, {where}, {row.arm}: {row.failure}"
        if row.pair == PRIME:
            yield f"{row.mode}: without {row.arm}, since its first start failed; --retry tries again"


def _waiting(record: Record) -> float:
    """The largest wall time per CPU second over whole runs; 0 where several threads share the work."""
    if record.head.get("threads") != 1:
        return 0.0
    ratios = [
        wall / cpu
        for row in record.rows
        if row.result is not None
        for measure in row.result.measures
        if (wall := measure.seconds("all", "wall")) and (cpu := measure.seconds("all", "cpu"))
    ]
    return max(ratios, default=0.0)


def _key(one: Comparison) -> tuple[str, int, str, str]:
    return one.mode, one.concurrency, one.phase, one.other


def _range(interval: Interval) -> str:
    return "?" if interval.low is None or interval.high is None else f"{interval.low:.3f} to {interval.high:.3f}"


def _width(interval: Interval) -> str:
    return "?" if interval.half_width is None else f"{interval.half_width:.1%}"


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "bytes":
        return f"{value / _GIB:.2f} GiB"
    return f"{value:.1f} s" if value >= 10 else f"{value:.3f} s"
