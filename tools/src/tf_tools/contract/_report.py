"""The contract on a terminal: uses, problems, differences between builds.

In: results. Out: tables, printed with rich.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tf_tools.contract._check import Problem
from tf_tools.contract._data import Entry, Place, Surface, Use
from tf_tools.contract._differences import differences
from tf_tools.contract._ledger import DERIVED, DYNAMIC, PATCHES, PRIVATE, WRITTEN


def print_uses(console: Console, uses: Sequence[Use], surfaces: Sequence[Surface], problems: Sequence[Problem]) -> None:
    """One row for each path: where we use it, how we call it, and what each build has there."""
    table = _table("What we use of vLLM", "use", "kind", "places", *(surface.source for surface in surfaces))
    broken = {(problem.source, problem.path) for problem in problems}
    grouped: dict[str, list[Use]] = {}
    for use in uses:
        if use.kind != "untyped":
            grouped.setdefault(use.path, []).append(use)
    for path in sorted(grouped):
        kinds = ", ".join(sorted({use.kind for use in grouped[path]}))
        calls = sorted({str(use.call) for use in grouped[path] if use.call is not None})
        places = sorted({use.place for use in grouped[path]})
        cells = [_cell(surface.entries.get(path), (surface.source, path) in broken) for surface in surfaces]
        table.add_row(escape("\n".join([path, *calls])), kinds, escape(_places(places)), *cells)
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _places(places: Sequence[Place]) -> str:
    return "\n".join(map(str, places))


def _cell(entry: Entry | None, is_broken: bool) -> str:
    if entry is None:
        return "[red]not recorded[/red]"
    if not entry.definitions:
        return "[red]missing[/red]"
    kinds = "/".join(sorted({one.kind for one in entry.definitions}))
    return f"[red]{kinds}, does not fit[/red]" if is_broken else f"[green]{kinds}[/green]"


def print_ledgers(console: Console) -> None:
    """Everything that needs a reason, with the reason."""
    table = _table("Ledgers", "what", "path", "why")
    for what, ledger in (("private", PRIVATE), ("derived", DERIVED), ("written", WRITTEN), ("dynamic", DYNAMIC)):
        for path, why in ledger.items():
            table.add_row(what, escape(path), escape(why))
    for patch in PATCHES:
        table.add_row(
            "patch", escape(patch.path), escape(f"{patch.why} {patch.how} {patch.upstream} Until: {patch.until}")
        )
    console.print(table)
    console.print(f"Patches to vLLM: {len(PATCHES) or 'none'}.")


def print_differences(console: Console, old: Surface, new: Surface) -> None:
    """What reads differently at the paths that we use."""
    table = _table(f"{old.source} -> {new.source}", "where", "what", "difference")
    for one in differences(old, new):
        table.add_row(escape(one.path), one.what, escape(one.text))
    console.print(table)


def print_problems(console: Console, problems: Sequence[Problem]) -> None:
    """Last, so that nobody scrolls for them."""
    for problem in problems:
        console.print(f"[red]{escape(str(problem))}[/red]")
    console.print(f"{len(problems)} problems." if problems else "The contract holds.")
