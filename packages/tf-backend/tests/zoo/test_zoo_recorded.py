"""The recorded matrices are whole, and their page is made from all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from tf_backend.zoo.record import matrices, recorded
from tf_backend.zoo.report import Matrix, as_markdown
from tf_backend.zoo.rows import STATUSES
from tf_backend.zoo.types import KINDS, entries

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"


def test_the_page_is_generated_from_the_data() -> None:
    assert PAGE.read_text() == as_markdown(matrices())


def test_the_installed_release_comes_first() -> None:
    first, *newer = (matrix.made.transformers for matrix in matrices())
    assert first == transformers.__version__
    assert transformers.__version__ not in newer


@pytest.mark.parametrize("matrix", matrices(), ids=lambda matrix: str(matrix.made.transformers))
def test_nothing_recorded_is_wrong(matrix: Matrix) -> None:
    names = [row.name for row in matrix.rows]
    assert names == sorted(set(names))
    assert {row.kind for row in matrix.rows} == set(KINDS)
    assert {row.status for row in matrix.rows} <= STATUSES.keys() - {"wrong", "failed"}
    assert [row.name for row in matrix.rows if row.status in ("refused", "not buildable") and not row.reason] == []
    assert sum(row.status in ("equal", "served") for row in matrix.rows) >= 80


def test_two_releases_at_least_are_recorded() -> None:
    assert len(matrices()) >= 2
    assert {matrix.made.capabilities for matrix in matrices()} == {matrices()[0].made.capabilities}


def test_numbers_were_compared_wherever_a_module_is_rewritten() -> None:
    """Of every release, installed or not; a type too large to be made has none and is not served."""
    for matrix in matrices():
        served = [row for row in matrix.rows if row.status in ("equal", "served") and row.fusions]
        assert [row.name for row in served if not row.numbers.startswith("equal")] == []


def test_no_later_release_loses_what_is_served() -> None:
    """Neither a type nor a fusion of one; a type that a release has dropped is no loss."""
    first, *later = ({row.name: row for row in matrix.rows} for matrix in matrices())
    for rows in later:
        for name in first.keys() & rows.keys():
            if first[name].status in ("equal", "served"):
                assert rows[name].status in ("equal", "served"), f"{name}: {rows[name].reason}"
                assert rows[name].fusions.keys() >= first[name].fusions.keys(), name


def test_every_installed_type_is_there() -> None:
    matrix = recorded(transformers.__version__)
    assert matrix is not None
    assert [row.name for row in matrix.rows] == sorted(entry.name for entry in entries())
    assert sum(row.status == "equal" for row in matrix.rows) >= 40
