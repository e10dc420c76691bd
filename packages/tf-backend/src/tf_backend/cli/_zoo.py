"""``tf-backend zoo``: what becomes of every model type of the installed transformers.

In: options. Out: exit status 1 when numbers are wrong, when looking at a type failed, or when `--check` finds a difference.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tf_backend import capabilities
from tf_backend.cli._console import make_console
from tf_backend.errors import OptionRefused

if TYPE_CHECKING:
    from tf_backend.zoo.rows import Level, Row

_MOST_LISTED = 40
"""Rows that are listed one by one; of more there is a count alone."""


class _Bar:
    """A progress bar that draws when something happens: a thread that draws would make forking unsafe."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[last]}"),
            console=console,
            auto_refresh=False,
        )
        self.task: TaskID | None = None

    def begin(self, level: Level, total: int) -> None:
        self.task = self.progress.add_task(level, total=total, last="") if total else None

    def done(self, name: str, status: str) -> None:
        if self.task is not None:
            self.progress.update(self.task, advance=1, last=f"{name} {status}")
            self.progress.refresh()


def run(options: argparse.Namespace) -> int:
    """Find out, show, write."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model's constructor may ask for another's config
    import warnings

    warnings.simplefilter("ignore")
    from tf_backend.zoo import record, report
    from tf_backend.zoo.results import Results, default_file, made_now
    from tf_backend.zoo.run import find_out, levels_up_to
    from tf_backend.zoo.types import select

    entries = select(options.names, options.kind or ())
    if (options.record or options.check) and (options.names or options.kind):
        raise OptionRefused("--record and --check are about all types. Leave out the names and --kind.")
    engine = capabilities.shipped() if options.capabilities is None else capabilities.load(options.capabilities)
    results = Results(Path(options.results or default_file()), made_now(engine), fresh=options.fresh)
    bar = _Bar(Console(file=sys.stderr, highlight=False, emoji=False))
    with bar.progress:
        rows = find_out(
            entries,
            levels_up_to(options.level),
            results,
            engine,
            at_once=options.jobs,
            timeout=options.timeout,
            watch=bar,
        )
    made = report.Made(results.made.transformers, results.made.torch, results.made.capabilities)
    if not options.json:
        _show(make_console(), rows)
    else:
        sys.stdout.buffer.write(report.as_json(rows, made))
    for path, text in ((options.csv, report.as_csv), (options.html, report.as_html)):
        if path is not None:
            _write(Path(path), text(rows, made))
    if options.record:
        for file in record.write(rows, made):
            print(f"wrote {file}", file=sys.stderr)
    differences = record.differences(rows, made) if options.check else ()
    for line in differences:
        print(line, file=sys.stderr)
    return 1 if differences or any(row.status in ("wrong", "failed") for row in rows) else 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionRefused(f"{path} cannot be written: {error.strerror}. Name another file.") from error
    print(f"wrote {path}", file=sys.stderr)


def _show(console: Console, rows: tuple[Row, ...]) -> None:
    from tf_backend.zoo.rows import STATUSES
    from tf_backend.zoo.types import KINDS

    bad = [row for row in rows if row.status in ("wrong", "failed")]
    listed = rows if len(rows) <= _MOST_LISTED else bad
    for row in listed:
        console.print(Text.assemble((row.name, "bold"), f"  {row.status} ", (f"({row.level})", "dim")))
        fusions = ", ".join(f"{count} {name}" for name, count in row.fusions.items())
        facts = (("fused", fusions), ("two ranks", row.tensor_2), ("numbers", row.numbers), ("engine", row.serve))
        for label, text in (*facts, ("why", row.reason), *(("missed", miss) for miss in row.misses)):
            if text:
                console.print(Text(f"  {label}: {text}"))
    if len(rows) <= _MOST_LISTED:
        return
    counts = Counter((row.kind, row.status) for row in rows)
    table = Table(box=None, pad_edge=False)
    table.add_column("kind")
    for status in STATUSES:
        table.add_column(status, justify="right")
    for kind in KINDS:
        if any(row.kind == kind for row in rows):
            table.add_row(kind, *(str(counts[kind, status] or "") for status in STATUSES))
    console.print(table)
