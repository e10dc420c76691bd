"""Rows as JSON, as a table for spreadsheets, as a page to look at, and as a page of documentation.

In: rows. Out: text. Everything is escaped: reasons quote source.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

import msgspec
from jinja2 import Environment, StrictUndefined

from tf_backend.zoo.changes import changes, without_lines
from tf_backend.zoo.rows import STATUSES, Row
from tf_backend.zoo.types import KINDS


class Made(msgspec.Struct, frozen=True):
    """What rows were found with."""

    transformers: str
    torch: str
    capabilities: str


class Matrix(msgspec.Struct, frozen=True):
    """All rows of one release of transformers, in order of name."""

    made: Made
    rows: tuple[Row, ...]


def as_json(rows: Sequence[Row], made: Made) -> bytes:
    """``{"made": ..., "rows": [...]}``, indented."""
    data = msgspec.json.encode({"made": made, "rows": list(rows)}, order="deterministic")
    return msgspec.json.format(data, indent=2) + b"\n"


def as_csv(rows: Sequence[Row], made: Made) -> str:
    """A header, then a line for each row; fusions and misses in one cell each."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["kind", *_COLUMNS, "transformers"])
    for row in rows:
        writer.writerow([row.kind, *(_cell(row, column) for column in _COLUMNS), made.transformers])
    return out.getvalue()


_COLUMNS = (
    "model_type",
    "architecture",
    "status",
    "level",
    "fusions",
    "tensor_2",
    "numbers",
    "serve",
    "reason",
    "misses",
)


def _cell(row: Row, column: str) -> str:
    if column == "fusions":
        return ", ".join(f"{count} {name}" for name, count in row.fusions.items())
    if column == "misses":
        return "; ".join(row.misses)
    return str(getattr(row, column))


def as_html(rows: Sequence[Row], made: Made) -> str:
    """One page that needs nothing else: columns sort on a click, rows filter by text, kind and status."""
    template = resources.files("tf_backend.zoo").joinpath("page.html.j2").read_text(encoding="utf-8")
    return _environment().from_string(template).render(_facts(rows, made))


def as_markdown(matrices: Sequence[Matrix]) -> str:
    """The page of documentation: the first matrix row by row, beside it the status of each other, and how they differ from it.

    Raises:
        ValueError: there is no matrix.
    """
    if not matrices:
        raise ValueError("a page is made of at least one matrix")
    first = matrices[0]
    facts = _facts(first.rows, first.made)
    facts["matrices"] = [
        {
            "made": matrix.made,
            "counts": _counts(matrix.rows),
            "status": {row.name: "not there" for row in first.rows} | {row.name: row.status for row in matrix.rows},
            "differences": {kind: tuple(_differences(first, matrix, kind)) for kind in KINDS},
        }
        for matrix in matrices
    ]
    facts["kinds"] = [kind for kind in KINDS if any(row.kind == kind for matrix in matrices for row in matrix.rows)]
    facts["others"] = facts["matrices"][1:]
    template = resources.files("tf_backend.zoo").joinpath("page.md.j2").read_text(encoding="utf-8")
    return _environment(html=False).from_string(template).render(facts)


def _differences(old: Matrix, new: Matrix, kind: str) -> Iterator[str]:
    """Lines for the types of one kind that `new` has, lost, or plans otherwise, wherever in their source the reasons lie."""
    before, now = ({row.name: row for row in matrix.rows if row.kind == kind} for matrix in (old, new))
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            yield f"**{before[name].model_type}** is not there"
        elif name not in before:
            yield f"**{now[name].model_type}** is new: {'; '.join(_said(now[name]))}"
        else:
            pair = without_lines(before[name]), without_lines(now[name])
            yield from (f"**{now[name].model_type}**, {line}" for line in changes(*pair))


def _said(row: Row) -> Iterator[str]:
    yield row.status
    for column in ("fusions", "numbers", "serve", "reason"):
        if text := _cell(row, column):
            yield text
    if row.tensor_2:
        yield f"two ranks: {row.tensor_2}"
    yield from (f"missed: {miss}" for miss in row.misses)


def _environment(*, html: bool = True) -> Environment:
    environment = Environment(autoescape=html, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = _markdown_cell
    environment.globals["text"] = _cell
    return environment


def _markdown_cell(text: str) -> str:
    """Text for a cell of a markdown table; angle brackets and pipes would be read as something else."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _facts(rows: Sequence[Row], made: Made) -> dict[str, Any]:
    return {
        "rows": rows,
        "made": made,
        "kinds": [kind for kind in KINDS if any(row.kind == kind for row in rows)],
        "statuses": STATUSES,
        "counts": _counts(rows),
    }


def _counts(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Kind -> status -> rows."""
    counts = Counter((row.kind, row.status) for row in rows)
    return {kind: {status: counts[kind, status] for status in STATUSES} for kind in KINDS}
