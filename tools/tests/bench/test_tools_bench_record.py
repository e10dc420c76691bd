"""The results file survives being cut, is continued only under the same conditions, and nothing else is taken for one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tf_tools.bench import BenchError, Record, Row, Settings, fingerprint, locked, open_record, read_record

MakeRow = Callable[..., Row]


def test_rows_come_back_as_they_were(record: Record, make_row: MakeRow) -> None:
    rows = [
        make_row("native", 0),
        make_row("native2", 0, failure="broke\nsecond line"),
        make_row("native", -1, repeats=0),
    ]
    for row in rows:
        record.append(row)
    again = read_record(record.file)
    assert again.rows == rows
    assert again.head == record.head


def test_a_line_cut_short_is_dropped_and_the_file_continued(
    record: Record, settings: Settings, make_row: MakeRow
) -> None:
    record.append(make_row("native", 0))
    with record.file.open("ab") as stream:
        stream.write(b'{"mode": "eager", "pa')
    assert len(read_record(record.file).rows) == 1
    again = open_record(record.file, fingerprint(settings))
    again.append(make_row("native2", 0))
    assert [row.arm for row in read_record(record.file).rows] == ["native", "native2"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_tokens": 65}, "input_tokens: 64 there, 65 now"),
        ({"arms": ("native", "in-tree")}, "arms"),
        ({"environment": {"A": "1"}}, "environment"),
        ({"dtype": "float32"}, "dtype"),
    ],
)
def test_other_settings_do_not_continue_a_file(
    record: Record, settings: Settings, change: dict[str, object], words: str
) -> None:
    before = record.file.read_bytes()
    with pytest.raises(BenchError, match=words):
        open_record(record.file, fingerprint(replace(settings, **change)))  # type: ignore[arg-type]
    assert record.file.read_bytes() == before


def test_another_checkpoint_does_not_continue_a_file(record: Record, settings: Settings) -> None:
    (settings.model / "config.json").write_text('{"changed": 1}')
    with pytest.raises(BenchError, match="checkpoint"):
        open_record(record.file, fingerprint(settings))


def test_the_measured_sources_are_part_of_the_conditions(settings: Settings) -> None:
    codes = [fingerprint(replace(settings, arms=arms))["code"] for arms in (("native", "in-tree"), ("native", "ours"))]
    assert codes[0] != codes[1]
    assert fingerprint(settings)["code"] == codes[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no results"),
        ("not JSON\n", "line 1: not JSON"),
        ("[1]\n", "expected a JSON object"),
        ('{"other": 1}\n', "does not begin as results"),
        ('{"bench": 1}\n{"mode": "eager"}\n', "line 2: not a row"),
        ('{"bench": 1}\nbroken\n{}\n', "line 2: not JSON"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(BenchError, match=words):
        read_record(file)


def test_a_file_of_another_kind_is_left_alone(tmp_path: Path, settings: Settings) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("dear diary\n")
    with locked(file), pytest.raises(BenchError, match="not JSON"):
        open_record(file, fingerprint(settings))
    assert file.read_text() == "dear diary\n"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot be read"):
        read_record(tmp_path / "absent")


def test_two_measurements_do_not_share_a_file(tmp_path: Path) -> None:
    with locked(tmp_path / "file"), pytest.raises(BenchError, match="another measurement"), locked(tmp_path / "file"):
        raise AssertionError("both hold the file")
    with locked(tmp_path / "file"):
        pass


def test_a_pair_is_made_of_rows_of_its_latest_attempt(record: Record, make_row: MakeRow) -> None:
    record.append(make_row("native", 0, attempt=1))
    record.append(make_row("native2", 0, attempt=1))
    record.append(make_row("native2", 0, attempt=2))
    assert record.last_attempt("eager", 0) == 2
    assert list(record.pair("eager", 0)) == ["native2"]
    assert record.pair("compiled", 0) == {}


def test_the_head_is_plain_json(record: Record) -> None:
    head = json.loads(record.file.read_text().splitlines()[0])
    assert head["bench"] == 1
    assert head["arms"] == ["native", "native2"]
    assert set(head["versions"]) >= {"python", "torch", "transformers"}
