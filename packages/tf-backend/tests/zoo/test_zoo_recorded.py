"""The recorded matrix is whole, and its page is made from it."""

from __future__ import annotations

from pathlib import Path

from tf_backend.zoo.record import recorded
from tf_backend.zoo.report import as_markdown
from tf_backend.zoo.types import entries

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"


def test_the_page_is_generated_from_the_data() -> None:
    made, rows = recorded()
    assert PAGE.read_text() == as_markdown(rows, made)


def test_nothing_recorded_is_wrong_and_every_type_is_there() -> None:
    _, rows = recorded()
    assert [row.name for row in rows] == sorted(entry.name for entry in entries())
    assert [row.name for row in rows if row.status in ("wrong", "failed")] == []
    assert sum(row.status == "equal" for row in rows) >= 40
