"""The command line: measure, continue, report; an error is one line and exit status 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tf_tools.bench import Settings
from tf_tools.bench.__main__ import main


@pytest.fixture
def fake(fake_launch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    launch = fake_launch({"in-tree": 1.2}, 0.002)
    monkeypatch.setattr("tf_tools.bench.__main__.launch", launch)
    monkeypatch.setattr("tf_tools.bench._run.code_digest", lambda arms: "steady")
    monkeypatch.setattr("tf_tools.bench._settings.code_digest", lambda arms: "steady")
    return launch


@pytest.fixture
def command(settings: Settings, tmp_path: Path) -> list[str]:
    arms = ["--arms", "ours,in-tree,ours2", "--concurrency", "1,8", "--json", str(tmp_path / "out" / "results.jsonl")]
    return ["--model", str(settings.model), *arms]


def test_it_measures_reports_and_continues(
    fake: Any, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--pairs", "6"]) == 0
    first = capsys.readouterr()
    assert "ours / in-tree" in first.out
    assert "pass" in first.out
    assert "eager    pair 5" in first.err
    assert len(fake.started) == 3 * 7
    assert main([*command, "--pairs", "7"]) == 0
    assert len(fake.started) == 3 * 8
    capsys.readouterr()
    assert main(["--report", str(tmp_path / "out" / "results.jsonl")]) == 0
    assert "ours / in-tree" in capsys.readouterr().out
    assert len(fake.started) == 3 * 8


def test_an_interrupt_ends_in_a_report(fake: Any, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    fake.stop_after = 8
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "needs 6 pairs" in printed.out
    assert "the same command continues" in printed.err


def test_no_time_left_ends_in_a_report(fake: Any, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--minutes", "0"]) == 0
    printed = capsys.readouterr()
    assert "No pair is complete" in printed.out
    assert "Stopped before all pairs" in printed.err


def test_check_fails_unless_all_pass(fake: Any, command: list[str], tmp_path: Path) -> None:
    assert main([*command, "--pairs", "6", "--check"]) == 0
    fake.times["in-tree"] = 0.8
    other = [*command[:-1], str(tmp_path / "slower.jsonl")]
    assert main([*other, "--pairs", "6", "--check"]) == 1
    few = [*command[:-1], str(tmp_path / "few.jsonl")]
    assert main([*few, "--pairs", "2", "--check"]) == 1


def test_without_a_file_nothing_is_left(
    fake: Any, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    assert main(["--model", str(settings.model), "--pairs", "1"]) == 0
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--report", "absent.jsonl"], "cannot be read"),
        (["--model", "absent"], "no config.json"),
        (["--model", "MODEL", "--arms", "ours,other"], "unknown arm"),
        (["--model", "MODEL", "--modes", "lazy"], "eager, compiled"),
        (["--model", "MODEL", "--pairs", "0"], "0 pairs"),
    ],
)
def test_an_error_is_one_line(
    fake: Any,
    settings: Settings,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(settings.model) if word == "MODEL" else word for word in arguments]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert "Traceback" not in printed.err
    assert fake.started == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--model", "a", "--report", "b"],
        ["--model", "a", "--concurrency", "one"],
        ["--model", "a", "--engine", "[1]"],
        ["--model", "a", "--engine", "{"],
        ["--model", "a", "--env", "NAME"],
        ["--model", "a", "--clock", "sun"],
    ],
)
def test_a_wrong_command_line_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
