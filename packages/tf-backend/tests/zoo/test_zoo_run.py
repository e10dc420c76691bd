"""What is known is not done again; what changed is; a crash is a row."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tf_backend.capabilities import Capabilities
from tf_backend.errors import OptionRefused
from tf_backend.zoo import run
from tf_backend.zoo.results import Made, Results
from tf_backend.zoo.rows import PlanFacts, Verdict
from tf_backend.zoo.types import Entry, select

ENTRIES = select(["llama", "qwen3", "falcon"], ["causal"])


@pytest.fixture
def levels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Jobs in the place of the real ones, by level and model type; `asked` is a folder of files named by what ran."""
    answers: dict[str, Any] = {
        "plan": {
            "llama": PlanFacts("served", fusions={"qkv": 2}),
            "qwen3": PlanFacts("served", fusions={"qkv": 2}),
            "falcon": PlanFacts("refused", "because"),
        },
        "numbers": {"llama": Verdict("equal", "", 3), "qwen3": Verdict("wrong", "half", 1, 0.5)},
        "serve": {"llama": Verdict("equal", "", 134)},
    }

    def prepared(level: str, capabilities: Capabilities) -> Any:
        def job(entry: Entry) -> Any:
            if answers.get("asked"):
                (answers["asked"] / f"{level}-{entry.model_type}").touch()
            if entry.model_type == answers.get("crash"):
                os._exit(9)
            return answers[level][entry.model_type]

        return job

    monkeypatch.setattr(run, "_prepared", prepared)
    return answers


def test_rows_of_all_levels(levels: dict[str, Any], results: Results, platform: Capabilities) -> None:
    levels["serve"]["qwen3"] = Verdict("equal", "", 134)
    rows = {row.model_type: row for row in run.find_out(ENTRIES, run.levels_up_to("serve"), results, platform)}
    assert [(rows[t].status, rows[t].level) for t in ("llama", "qwen3", "falcon")] == [
        ("equal", "serve"),
        ("wrong", "numbers"),
        ("refused", "plan"),
    ]
    assert rows["llama"].numbers == "equal (3 variants)"
    assert rows["qwen3"].reason == "numbers: half"
    assert rows["falcon"].reason == "because"


def test_a_crash_is_a_row_and_the_others_are_done(
    levels: dict[str, Any], results: Results, platform: Capabilities
) -> None:
    levels["crash"] = "llama"
    rows = {row.model_type: row for row in run.find_out(ENTRIES, ("plan",), results, platform)}
    assert rows["llama"].status == "failed"
    assert "exit status 9" in rows["llama"].reason
    assert rows["qwen3"].status == "served"


def test_what_is_known_is_not_done_again(
    levels: dict[str, Any], results: Results, made: Made, platform: Capabilities, tmp_path: Path
) -> None:
    run.find_out(ENTRIES[:1], ("plan",), results, platform)
    levels["asked"] = tmp_path / "asked"
    levels["asked"].mkdir()
    again = Results(results.file, made)
    assert again.is_continued
    rows = run.find_out(ENTRIES, ("plan",), again, platform)
    assert len(rows) == 3
    assert len(list(levels["asked"].iterdir())) == 2


def test_other_sources_begin_anew(results: Results, made: Made) -> None:
    results.add("causal/llama", "plan", PlanFacts("served"), 0.1)
    assert Results(results.file, made).get("causal/llama", "plan", PlanFacts) == PlanFacts("served")
    other = Results(results.file, msgspec.structs.replace(made, sources_sha256="3" * 64))
    assert not other.is_continued
    assert other.get("causal/llama", "plan", PlanFacts) is None


def test_a_last_line_that_was_cut_short_is_left_out(results: Results, made: Made) -> None:
    results.add("causal/llama", "plan", PlanFacts("served"), 0.1)
    results.add("causal/qwen3", "plan", PlanFacts("served"), 0.1)
    results.file.write_bytes(results.file.read_bytes()[:-20])
    again = Results(results.file, made)
    assert again.get("causal/llama", "plan", PlanFacts) is not None
    assert again.get("causal/qwen3", "plan", PlanFacts) is None
    again.add("causal/qwen3", "plan", PlanFacts("served"), 0.1)
    assert Results(results.file, made).get("causal/qwen3", "plan", PlanFacts) is not None


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path, made: Made) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("my notes\n")
    with pytest.raises(OptionRefused, match="does not hold results"):
        Results(file, made)
    assert file.read_text() == "my notes\n"


def test_a_folder_that_cannot_be_written(tmp_path: Path, made: Made) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionRefused, match="cannot be"):
        Results(tmp_path / "file" / "results.jsonl", made)


def test_a_crash_in_one_role_does_not_take_the_others_along(
    levels: dict[str, Any], results: Results, platform: Capabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepared(level: str, capabilities: Capabilities) -> Any:
        def job(entry: Entry) -> PlanFacts:
            if entry.kind == "classification":
                os._exit(9)
            return PlanFacts("refused", str(os.getpid()))

        return job

    monkeypatch.setattr(run, "_prepared", prepared)
    rows = {row.name: row for row in run.find_out(select(["bert", "albert"]), ("plan",), results, platform)}
    assert {name: row.status for name, row in rows.items()} == {
        "causal/bert": "refused",
        "encoder/albert": "refused",
        "encoder/bert": "refused",
        "embedding/albert": "refused",
        "embedding/bert": "refused",
        "classification/albert": "failed",
        "classification/bert": "failed",
    }
    del levels
