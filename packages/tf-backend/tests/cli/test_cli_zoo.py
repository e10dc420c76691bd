"""``tf-backend zoo`` from the outside: one run in a process of its own, and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tf_backend.cli import main

_RUN = """
import sys
from tf_backend.cli import main
status = main(sys.argv[1:])
assert "vllm" not in sys.modules, "planning needs no engine"
sys.exit(status)
"""


def test_two_types_as_json_and_files(tmp_path: Path) -> None:
    files = {option: tmp_path / f"out.{option}" for option in ("csv", "html")}
    arguments = ["zoo", "causal/llama", "causal/falcon", "--json", "--results", str(tmp_path / "results.jsonl")]
    for option, file in files.items():
        arguments += [f"--{option}", str(file)]
    done = subprocess.run([sys.executable, "-c", _RUN, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert (rows["causal/llama"]["status"], rows["causal/falcon"]["status"]) == ("served", "refused")
    assert files["csv"].read_text().count("\n") == 3
    assert "LlamaForCausalLM" in files["html"].read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuchtype"], "has no model type `nosuchtype`"),
        (["llama", "--kind", "vision"], "there is no kind `vision`"),
        (["llama", "--level", "all"], "--level"),
        (["llama", "--record"], "about all types"),
        (["llama", "--jobs", "0"], "--jobs"),
        (["llama", "--capabilities", "/nowhere.json"], "/nowhere.json cannot be read"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1
