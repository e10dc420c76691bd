"""The recorded matrix is what planning gives now. In the engine part, since it takes minutes; it starts no engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tf_backend.capabilities import Capabilities
from tf_backend.zoo.record import differences, recorded
from tf_backend.zoo.report import Made, as_markdown
from tf_backend.zoo.results import Results, made_now
from tf_backend.zoo.run import find_out
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


@pytest.mark.engine
def test_every_type_is_planned_as_recorded(platform: Capabilities, tmp_path: Path) -> None:
    made = made_now(platform)
    rows = find_out(entries(), ("plan",), Results(tmp_path / "results.jsonl", made), platform)
    changed = differences(rows, Made(made.transformers, made.torch, made.capabilities))
    assert not changed, "\n" + "\n".join(changed)
