"""Exit status and standard error of the command, whatever happens inside."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest
from tf_backend.cli import _parser, main
from tf_backend.cli._present import EngineFailed
from tf_backend.errors import ModelRefused, OptionRefused
from tf_backend.plan.schema import Refusal


def _raising(error: BaseException):
    def run(options: argparse.Namespace) -> int:
        raise error

    return run


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in ("inspect", "demo", "capabilities", "version"):
        assert command in out


@pytest.mark.parametrize(
    "command", [["inspect"], ["demo"], ["capabilities", "show"], ["capabilities", "record"], ["version"]]
)
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    assert "--debug" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["frobnicate"], "frobnicate"),
        (["inspect"], "MODEL"),
        (["inspect", "x", "--colour"], "--colour"),
        (["inspect", "x", "--json", "--diff"], "not allowed with"),
        (["inspect", "x", "--tensor-parallel-size", "0"], "'0' was given"),
        (["inspect", "x", "--tensor-parallel-size", "two"], "'two' was given"),
        (["demo", "--max-tokens", "-1"], "--max-tokens"),
        (["demo", "--dtype", "int4"], "int4"),
        (["demo", "--eager", "--compile"], "not allowed with"),
        (["capabilities"], "ACTION"),
        (["capabilities", "show", "no-such-engine"], "no-such-engine"),
    ],
)
def test_wrong_options_are_one_line_and_status_1(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_an_error_of_ours_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_parser, "_version", _raising(OptionRefused("it is too late. Come earlier.")))
    assert main(["version"]) == 1
    assert capsys.readouterr().err == "error: it is too late. Come earlier.\n"


def test_a_refused_model_has_its_own_status(
    refusal: Refusal, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = EngineFailed("starting", ModelRefused([refusal], architecture="ToyForCausalLM"))
    monkeypatch.setattr(_parser, "_version", _raising(failed))
    assert main(["version"]) == 2
    assert capsys.readouterr().err.startswith("error: ToyForCausalLM cannot be served: attention takes `position_bias`")


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_parser, "_version", _raising(OptionRefused("no.")))
    assert main(["version", "--debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.endswith("error: no.\n")


def test_an_unexpected_error_has_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_parser, "_version", _raising(ZeroDivisionError("division by zero")))
    assert main(["version"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "ZeroDivisionError: division by zero" in err
    assert "--debug" in err


def test_interrupt_gives_the_status_of_a_shell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_parser, "_version", _raising(KeyboardInterrupt()))
    assert main(["version"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_version_lists_packages_and_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert {
        "tf-backend",
        "fx-match",
        "ast-rewrite",
        "vllm-layers-bridge",
        "moe-runner",
        "torch",
        "transformers",
    } <= listed
    assert any(name.startswith("vllm") for name in listed - {"vllm-layers-bridge"})
    assert main(["--version"]) == 0


def test_help_and_version_import_nothing_heavy() -> None:
    code = (
        "import sys; from tf_backend.cli import main; main(['--help']); main(['version']); "
        "print([m for m in ('torch', 'transformers', 'vllm', 'rich', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_module_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "tf_backend", "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")


def test_a_reader_that_leaves_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m tf_backend capabilities show | true",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
