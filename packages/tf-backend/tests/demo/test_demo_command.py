"""`tf-backend demo`: the whole of it once with the engine, and its errors without."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tf_backend import capabilities
from tf_backend.cli import main


def test_without_an_engine_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(capabilities, "installed", lambda: None)
    assert main(["demo"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: the demo needs the vLLM engine")
    assert 'pip install "tf-backend[cuda]"' in err
    assert err.count("\n") == 1


def _demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tf_backend", "demo", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_folder_that_is_not_there() -> None:
    done = _demo("--model", "no-such-owner/no-such-folder")
    assert done.returncode == 1
    assert done.stderr == "error: no-such-owner/no-such-folder does not exist. Name a folder that holds config.json.\n"


@pytest.mark.engine
def test_demo_streams_completions_and_reports_rates() -> None:
    done = _demo("--max-tokens", "12", "--prompt", "What is the capital of France?", "What is 2+2?")
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM" in done.stdout
    assert "> What is the capital of France?\n" in done.stdout
    assert "Paris" in done.stdout
    rates = re.findall(r"\((\d+(?:\.\d+)?) tokens/s\)", done.stdout)
    assert len(rates) == 2
    assert all(float(rate) > 0 for rate in rates)
    assert "Traceback" not in done.stderr
    assert "WARNING" not in done.stderr


@pytest.mark.engine
def test_weights_that_are_not_there_are_an_error_of_one_line(tmp_path: Path) -> None:
    from tf_backend.demo import prepare_smollm2

    prepared = prepare_smollm2()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((prepared / name).read_bytes())
    done = _demo("--model", str(tmp_path))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.engine
def test_engine_without_the_plugin_is_not_mistaken_for_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    done = _demo()
    assert done.returncode == 1
    assert "the engine did not load the plugin `tf_backend` (VLLM_PLUGINS is 'none')" in done.stderr.splitlines()[-1]
