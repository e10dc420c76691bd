"""Rows as text, and how they differ from what is recorded."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import msgspec
import pytest
from tf_backend.errors import OptionRefused
from tf_backend.zoo import record
from tf_backend.zoo.changes import without_lines
from tf_backend.zoo.report import Made, Matrix, as_csv, as_html, as_json, as_markdown
from tf_backend.zoo.rows import PlanFacts, Row, Verdict, make_row

MADE = Made("5.19.0", "2.13.0", "some engine")
ROWS = (
    Row(
        "causal/a",
        "AForCausalLM",
        "equal",
        "serve",
        "",
        {"qkv": 2},
        (),
        "split",
        "equal (3 variants)",
        "equal (134 positions)",
    ),
    Row(
        "causal/b",
        "BForCausalLM",
        "refused",
        "plan",
        "`x<y>` | <script>alert(1)</script>",
        {},
        ("BNorm, rms_norm: no (line 7)",),
    ),
    Row("encoder/c", "CForMaskedLM", "not buildable", "plan", "no config"),
)


def test_json_and_csv_hold_every_row() -> None:
    data = json.loads(as_json(ROWS, MADE))
    assert [row["name"] for row in data["rows"]] == ["causal/a", "causal/b", "encoder/c"]
    assert data["made"]["transformers"] == "5.19.0"
    head, *lines = csv.reader(io.StringIO(as_csv(ROWS, MADE)))
    assert head[:4] == ["kind", "model_type", "architecture", "status"]
    assert [line[3] for line in lines] == ["equal", "refused", "not buildable"]
    assert lines[1][head.index("reason")] == ROWS[1].reason


def test_the_page_stands_alone_and_escapes_what_models_say() -> None:
    page = as_html(ROWS, MADE)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "http" not in page.replace("http-equiv", ""), "nothing is fetched"
    assert page.count("<tr data-kind=") == 3
    assert 'class="chip not-buildable"' in page


def test_markdown_has_a_row_for_each_type_and_counts() -> None:
    page = as_markdown([Matrix(MADE, ROWS)])
    assert "| causal | 5.19.0 | 1 |  | 1 |" in page
    (line,) = [line for line in page.splitlines() if line.startswith("| b |")]
    assert line.replace("\\|", "").count("|") == 8
    assert "<script>" not in page
    assert "*missed*: BNorm, rms_norm: no (line 7)." in line
    assert "what differs" not in page


def test_another_release_is_a_column_and_a_list_of_what_differs() -> None:
    moved = msgspec.structs.replace(ROWS[1], misses=("BNorm, rms_norm: no (line 19)",))
    other = Matrix(
        msgspec.structs.replace(MADE, transformers="5.24.0"),
        (
            msgspec.structs.replace(ROWS[0], status="served", level="plan", fusions={"qkv": 1}, serve=""),
            moved,
            Row("causal/e", "E", "refused", "plan", "no <such> thing", {}, ("ENorm, rms_norm: no",)),
        ),
    )
    page = as_markdown([Matrix(MADE, ROWS), other])
    lines = page.splitlines()
    assert "|  | 5.24.0 |  | 1 | 2 |" in page
    (line,) = [line for line in lines if line.startswith("| a |")]
    assert line.startswith("| a | equal | served |")
    assert any(line.startswith("| c | not buildable | not there |") for line in lines)
    assert [line for line in lines if re.match(r"- \*\*[ace]\*\*", line)] == [
        "- **a**, qkv: 2 modules, now 1",
        "- **e** is new: refused; no &lt;such> thing; missed: ENorm, rms_norm: no",
        "- **c** is not there",
    ]
    with pytest.raises(ValueError, match="at least one"):
        as_markdown([])


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("no (line 7)", "no"),
        ("in `a` (transformers.models.x, line 621). Serve", "in `a` (transformers.models.x). Serve"),
        ("the block (at 227:25-227:52) (line 185)", "the block"),
        ("2 norms, one at 64 wide", "2 norms, one at 64 wide"),
    ],
)
def test_lines_of_source_are_left_out(said: str, left: str) -> None:
    assert without_lines(Row("causal/a", "A", "refused", "plan", said)).reason == left


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {MADE.transformers: Matrix(MADE, ROWS)}
    monkeypatch.setattr(record, "recorded", known.get)
    monkeypatch.setattr(record, "matrices", lambda: tuple(known.values()))


@pytest.mark.usefixtures("recorded")
def test_no_difference_whether_or_not_the_engine_was_asked() -> None:
    planned = msgspec.structs.replace(ROWS[0], status="served", level="plan", numbers="", serve="")
    assert record.differences((planned, *ROWS[1:]), MADE) == ()


@pytest.mark.usefixtures("recorded")
def test_each_change_is_a_line() -> None:
    now = (
        msgspec.structs.replace(ROWS[0], fusions={"qkv": 1, "rms_norm": 5}, status="refused", reason="now <why>"),
        msgspec.structs.replace(ROWS[1], misses=("BNorm, rms_norm: yes (line 8)",)),
        Row("encoder/d", "D", "served", "plan"),
    )
    *lines, last = record.differences(now, MADE)
    assert lines == [
        "causal/a: status: served\n    now: refused",
        "causal/a: reason: nothing\n    now: now <why>",
        "causal/a: qkv: 2 modules, now 1",
        "causal/a: rms_norm: 0 modules, now 5",
        "causal/b: no longer missed: BNorm, rms_norm: no (line 7)",
        "causal/b: missed now: BNorm, rms_norm: yes (line 8)",
        "encoder/c: no longer there",
        "encoder/d: not recorded",
    ]
    assert "tf-backend zoo --record" in last


@pytest.mark.usefixtures("recorded")
def test_other_versions_cannot_be_compared() -> None:
    (line,) = record.differences(ROWS, msgspec.structs.replace(MADE, transformers="5.20.0"))
    assert line == "nothing is recorded for transformers 5.20.0 (recorded: 5.19.0)"
    (line,) = record.differences(ROWS, msgspec.structs.replace(MADE, torch="2.14.0"))
    assert "torch 2.14.0" in line
    assert "nothing can be compared" in line


@pytest.mark.usefixtures("recorded")
def test_a_verdict_of_the_engine_is_kept_while_the_plan_stays() -> None:
    planned = msgspec.structs.replace(ROWS[0], status="served", level="plan", numbers="", serve="")
    assert record._carried(planned, ROWS[0]) == ROWS[0]
    elsewhere = msgspec.structs.replace(planned, tensor_2="refused: no")
    assert record._carried(elsewhere, ROWS[0]) == msgspec.structs.replace(ROWS[0], tensor_2="refused: no")
    changed = msgspec.structs.replace(planned, fusions={"qkv": 1})
    assert record._carried(changed, ROWS[0]) == changed
    with_numbers = msgspec.structs.replace(planned, level="numbers", numbers="equal (4 variants)")
    assert record._carried(with_numbers, ROWS[0]) == msgspec.structs.replace(ROWS[0], numbers="equal (4 variants)")
    assert record._carried(with_numbers, planned) == with_numbers
    asked = msgspec.structs.replace(ROWS[0], serve="equal (7 positions)")
    assert record._carried(asked, ROWS[0]) == asked


def test_failures_are_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(OptionRefused, match="causal/a"):
        record.write([msgspec.structs.replace(ROWS[0], status="failed")], MADE)


def test_the_worst_news_decides() -> None:
    plan = PlanFacts("served", fusions={"qkv": 2})
    equal, wrong = Verdict("equal", "", 3), Verdict("wrong", "off")
    assert make_row("causal/a", "A", plan, equal).status == "served"
    assert make_row("causal/a", "A", plan, equal, equal).status == "equal"
    assert make_row("causal/a", "A", plan, wrong, equal).status == "wrong"
    assert make_row("causal/a", "A", plan, equal, wrong).reason == "serve: off"
    assert make_row("causal/a", "A", PlanFacts("refused", "why"), equal).status == "refused"
