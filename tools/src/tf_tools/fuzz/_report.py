"""Tallies as tables: how much was fused, why the rest was not, and every counterexample with its source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from tf_tools.fuzz._campaign import Tally

_SHOWN = 12


def report(tallies: Sequence[Tally]) -> RenderableType:
    """What to print."""
    parts: list[RenderableType] = [_counts(tallies)]
    parts += [_reasons(tally) for tally in tallies if tally.reasons]
    for tally in tallies:
        if (problem := tally.counterexample) is not None:
            parts += [Text(f"\n{tally.kind}: {problem.problem}\n", style="red"), Syntax(str(problem.program), "python")]
    return Group(*parts)


def print_report(tallies: Sequence[Tally]) -> None:
    """To standard output."""
    Console(width=150 if not Console().is_terminal else None).print(report(tallies))


def _counts(tallies: Sequence[Tally]) -> Table:
    table = Table(title="Generated modules, fused and split over two ranks")
    for name in ("kind", "examples", "run", "fused", "%", "split", "%", "comparisons", "seconds", "counterexample"):
        table.add_column(name, justify="left" if name in {"kind", "counterexample"} else "right")
    for tally in tallies:
        table.add_row(tally.kind, *_row(tally), "found" if tally.counterexample else "none")
    if len(tallies) > 1:
        total = Tally("all")
        for name in ("examples", "ran", "fused", "split", "compared", "seconds"):
            setattr(total, name, sum(getattr(tally, name) for tally in tallies))
        found = sum(tally.counterexample is not None for tally in tallies)
        table.add_section()
        table.add_row("all", *_row(total), str(found) if found else "none")
    return table


def _row(tally: Tally) -> tuple[str, ...]:
    whole = max(tally.examples, 1)
    return (
        str(tally.examples),
        str(tally.ran),
        str(tally.fused),
        f"{100 * tally.fused / whole:.0f}",
        str(tally.split),
        f"{100 * tally.split / whole:.0f}",
        str(tally.compared),
        f"{tally.seconds:.0f}",
    )


def _reasons(tally: Tally) -> Table:
    table = Table(title=f"{tally.kind}: not fused, because", title_justify="left")
    table.add_column("examples", justify="right")
    table.add_column("reason", overflow="fold")
    for reason, count in Counter(tally.reasons).most_common(_SHOWN):
        table.add_row(str(count), reason)
    return table
