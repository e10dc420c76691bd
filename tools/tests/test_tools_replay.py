"""Dumps of rewritten forwards, and how they differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from tf_tools.replay import compare, dump
from tf_tools.replay.__main__ import main


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    assert dump(folder, ["causal/llama", "causal/phi3", "causal/musicgen"]) == 3
    return folder


def test_a_file_holds_what_runs_and_what_it_calls(dumped: Path) -> None:
    text = (dumped / "causal/llama.txt").read_text()
    assert text.startswith("LlamaForCausalLM: served\n")
    assert "=== transformers.models.llama.modeling_llama:LlamaMLP, 2 modules: rewrite" in text
    assert "fusion gated_mlp, lines " in text
    assert '"gate_proj"' in text
    assert "self.gate_up_proj" in text
    assert (dumped / "causal/musicgen.txt").read_text().startswith("not buildable: ")


def test_the_same_sources_give_the_same_dump(dumped: Path, tmp_path: Path) -> None:
    dump(tmp_path, ["causal/llama", "causal/phi3", "causal/musicgen"])
    assert list(compare(dumped, tmp_path)) == []


def test_a_change_is_a_diff_of_its_type(dumped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("llama", "phi3"):
        file = tmp_path / f"causal/{name}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text((dumped / f"causal/{name}.txt").read_text().replace("LlamaMLP, 2", "LlamaMLP, 1"))
    changes = list(compare(dumped, tmp_path))
    assert [change.name for change in changes] == ["causal/llama", "causal/musicgen"]
    assert "-=== transformers.models.llama.modeling_llama:LlamaMLP, 2 modules" in changes[0].diff
    assert main(["diff", str(dumped), str(tmp_path)]) == 1
    assert "+=== transformers.models.llama.modeling_llama:LlamaMLP, 1 modules" in capsys.readouterr().out
    assert main(["diff", str(dumped), str(dumped)]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dump", "{tmp}/x", "nosuchtype"], "nosuchtype"),
        (["diff", "{tmp}/nowhere", "{tmp}"], "no folder"),
        (["against", "nosuchcommit"], "nosuchcommit"),
        (["dump", "{tmp}/x", "llama", "--packages", "{tmp}/nowhere"], "nowhere"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.format(tmp=tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
