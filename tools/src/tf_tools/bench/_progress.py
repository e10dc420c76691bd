"""What a measurement tells while it runs: a bar on a terminal, one line per process in a file."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tf_tools.bench._rows import Row
from tf_tools.bench._schedule import PRIME, Start


class ConsoleProgress:
    """A `tf_tools.bench._run.Progress` for people; a context manager."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> ConsoleProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.stop()

    def begins(self, starts: Sequence[Start]) -> None:
        first = starts[0]
        self._bar.update(self._task, description=f"{first.mode} {_pair(first.pair)} {', '.join(s.arm for s in starts)}")

    def ended(self, row: Row) -> None:
        self._bar.advance(self._task)
        what = "failed: " + row.failure.partition("\n")[0] if row.result is None else _summary(row)
        line = f"{row.mode:<8} {_pair(row.pair):<11} {row.arm:<8} {row.seconds:6.1f} s  {what}"
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def skipped(self, count: int) -> None:
        self._bar.advance(self._task, count)


def _pair(pair: int) -> str:
    return "first start" if pair == PRIME else f"pair {pair}"


def _summary(row: Row) -> str:
    assert row.result is not None
    rates = [
        f"{measure.tokens('all') / seconds:.1f}"
        for measure in row.result.measures
        if (seconds := measure.seconds("all", "cpu"))
    ]
    rate = f", tokens per CPU second {' '.join(rates)}" if rates else ""
    return f"load {row.result.load_wall:.1f} s{rate}"
