"""Rows as JSON, as a table for spreadsheets, as a page to look at, and as a page of documentation.

In: rows. Out: text. Everything is escaped: reasons quote source.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from importlib import resources

import msgspec
from jinja2 import Environment, StrictUndefined

from tf_backend.zoo.rows import STATUSES, Row
from tf_backend.zoo.types import KINDS


class Made(msgspec.Struct, frozen=True):
    """What rows were found with."""

    transformers: str
    torch: str
    capabilities: str


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


def as_markdown(rows: Sequence[Row], made: Made) -> str:
    """The page of documentation."""
    template = resources.files("tf_backend.zoo").joinpath("page.md.j2").read_text(encoding="utf-8")
    return _environment(html=False).from_string(template).render(_facts(rows, made))


def _environment(*, html: bool = True) -> Environment:
    environment = Environment(autoescape=html, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = _markdown_cell
    environment.globals["text"] = _cell
    return environment


def _markdown_cell(text: str) -> str:
    """Text for a cell of a markdown table; angle brackets and pipes would be read as something else."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _facts(rows: Sequence[Row], made: Made) -> dict[str, object]:
    counts = Counter((row.kind, row.status) for row in rows)
    kinds = [kind for kind in KINDS if any(row.kind == kind for row in rows)]
    return {
        "rows": rows,
        "made": made,
        "kinds": kinds,
        "statuses": STATUSES,
        "counts": {kind: {status: counts[kind, status] for status in STATUSES} for kind in kinds},
    }
