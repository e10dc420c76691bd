"""`tf-backend serve` before its engine starts: what is refused, in which words, with which status. No engine is started here."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from tf_backend.cli import main
from tf_backend.cli._parser import build_parser
from tf_tools.bad_inputs import BAD_INPUTS
from tf_tools.engine import warm
from tf_tools.fork import Outcome, run_in_fork


def test_arguments_are_left_to_the_parser_of_the_engine() -> None:
    given = ["MODEL", "--port", "1", "-tp", "2", "-O3", "--help", "--", "--x.y=1", "-h"]
    assert not build_parser().parse_args(["serve", *given]).debug
    options = build_parser().parse_args(["serve", *given, "--debug"])
    assert options.arguments == given
    assert options.debug


def test_help_of_the_command_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out


def test_without_an_engine_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert main(["serve", "model"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: serving a model needs the vLLM engine, and it is not installed.")
    assert err.count("\n") == 1


def test_an_engine_that_cannot_be_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("tf_backend.cli._serve_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.cli.serve", None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert main(["serve", "model"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: the engine failed while being imported: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.parametrize("is_running", [False, True])
def test_sigterm_is_told_from_ctrl_c(
    number: int, status: int, is_running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tf_backend.cli import _serve

    before = [signal.getsignal(known) for known in (signal.SIGINT, signal.SIGTERM)]

    def serve(given: list[str], distribution: str, is_debugged: bool) -> list[int]:
        if not is_running:
            with contextlib.suppress(KeyboardInterrupt, Exception):  # as some code of the engine does
                signal.raise_signal(number)
        return [number]

    monkeypatch.setattr(_serve, "_serve", serve)
    assert main(["serve", "model"]) == status
    assert [signal.getsignal(known) for known in (signal.SIGINT, signal.SIGTERM)] == before


def _served(*arguments: object) -> Outcome:
    """`main` in a fork of a process that has vLLM; nothing that these tests ask for gets as far as an engine."""
    warm()
    return run_in_fork(_main, 120, ["serve", *map(str, arguments)])


def _main(arguments: list[str]) -> int:
    from tf_backend.cli import _serve_server

    def serve(options: argparse.Namespace) -> list[int]:
        print(
            "reached", json.dumps({name: getattr(options, name) for name in ("model", "model_impl", "port", "dtype")})
        )
        return [signal.SIGTERM]

    _serve_server.serve = serve  # type: ignore[assignment]
    return main(arguments)


def _refusal(outcome: Outcome, status: int) -> str:
    """The one line that is seen: nothing is logged before it, on standard output or error."""
    assert outcome.value() == status, outcome.stderr
    assert outcome.stdout == ""
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def _reached(outcome: Outcome) -> dict[str, object]:
    assert outcome.value() == 0, outcome.stderr
    (line,) = [line for line in outcome.stdout.splitlines() if line.startswith("reached ")]
    found = json.loads(line.removeprefix("reached "))
    assert isinstance(found, dict)
    return found


@pytest.mark.engine
def test_a_good_model_reaches_the_server_with_our_default(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")
    assert _reached(_served(folder, "--port", "8123", "--dtype", "float32", "--skip-tokenizer-init")) == {
        "model": str(folder),
        "model_impl": "transformers",
        "port": 8123,
        "dtype": "float32",
    }


@pytest.mark.engine
def test_a_config_file_is_read_and_yields_to_options(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("llama")
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: {folder}\nport: 8124\ndtype: float32\nmodel-impl: vllm\n")
    found = _reached(_served("--config", file, "--port", "8125"))
    assert found == {"model": str(folder), "model_impl": "vllm", "port": 8125, "dtype": "float32"}


@pytest.mark.engine
def test_help_is_that_of_the_engine_under_our_name() -> None:
    outcome = _served("--help")
    assert outcome.value() == 0
    assert outcome.stdout.startswith("usage: tf-backend serve ")
    assert "ModelConfig" in outcome.stdout
    assert "vllm serve" not in outcome.stdout
    # The texts of options are made when the engine is imported, and only where the process was started for them.
    command = [sys.executable, "-m", "tf_backend", "serve", "--help=model-impl"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "(default: transformers)" in " ".join(found.stdout.split())


@pytest.mark.engine
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--colour", "red"), ("--colour red", "--help=all")),
        (("--port", "abc"), ("--port", "abc")),
        (("--dtype", "int4"), ("--dtype", "int4")),
        (("--config", "nowhere.yaml"), ("nowhere.yaml",)),
        (("--enable-auto-tool-choice",), ("--tool-call-parser",)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_a_wrong_option_is_one_line(
    arguments: tuple[str, ...], words: tuple[str, ...], checkpoint: Callable[[str], Path]
) -> None:
    said = _refusal(_served(checkpoint("llama"), *arguments), 1)
    assert all(word in said for word in words), said


@pytest.mark.engine
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--enable-lora",), "LoRA"),
        (("--quantization", "fp8"), "quantized"),
        (("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'), "speculative"),
        (("--additional-config", '{"tf_backend": {"strickt": true}}'), "strickt"),
        (("--max-model-len", "100000"), "max_model_len"),
        (("--enable-eplb", "--enable-expert-parallel"), "load balancing is only supported on"),
        (("-pp", "2", "--enforce-eager"), "pipeline stages only compiled"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_an_option_that_is_not_served(
    arguments: tuple[str, ...], words: str, checkpoint: Callable[[str], Path]
) -> None:
    said = _refusal(_served(checkpoint("llama"), *arguments), 1)
    assert words in said
    assert "type=value_error" not in said
    assert "input_value" not in said


@pytest.mark.engine
def test_ranks_that_divide_no_heads_are_told_as_inspect_does(checkpoint: Callable[[str], Path]) -> None:
    said = _refusal(_served(checkpoint("llama"), "--tensor-parallel-size", "3"), 2)
    assert "cannot be split over 3 ranks: it has 4 heads" in said
    assert said.endswith("Set `--tensor-parallel-size` to 1, 2 or 4.")


@pytest.mark.engine
def test_a_model_is_not_chosen_by_the_engine() -> None:
    assert "no MODEL is given" in _refusal(_served(), 1)
    assert "no MODEL is given" in _refusal(_served("--port", "8126"), 1)


@pytest.mark.engine
def test_a_folder_without_a_tokenizer_says_what_to_give(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    said = _refusal(_served(folder), 1)
    assert f"a folder holds no tokenizer, file {folder}, expected tokenizer.json" in said
    assert "`--tokenizer NAME`" in said
    assert "`--skip-tokenizer-init`" in said
    (folder / "tokenizer.json").write_text("{}")
    assert _reached(_served(folder))["model"] == str(folder)


@pytest.mark.engine
def test_a_pooling_model_is_refused(checkpoint: Callable[[str], Path]) -> None:
    assert "does not serve pooling models" in _refusal(_served(checkpoint("llama"), "--runner", "pooling"), 2)


@pytest.mark.engine
def test_a_refused_model_is_one_line_and_status_2(tmp_path: Path) -> None:
    from transformers import FalconH1Config

    sizes = {"vocab_size": 384, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32}
    mixer = {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16}
    config = FalconH1Config(**sizes, **mixer, num_attention_heads=4, num_key_value_heads=2)
    config.architectures = ["FalconH1ForCausalLM"]
    config.save_pretrained(tmp_path)
    said = _refusal(_served(tmp_path, "--load-format", "dummy"), 2)
    assert said.startswith("error: FalconH1ForCausalLM cannot be served")


@pytest.mark.engine
@pytest.mark.parametrize("fault", sorted(BAD_INPUTS))
def test_a_broken_folder_is_told_before_the_engine(
    fault: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    bad = BAD_INPUTS[fault](checkpoint("llama"), tmp_path / "bad")
    if fault == "no-tensors":
        bad = bad.__class__(bad.folder, bad.fault, (("model.safetensors",),))
    assert bad.unsaid(_refusal(_served(bad.folder), 1)) == []


@pytest.mark.engine
@pytest.mark.parametrize(
    ("wrong", "status", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, 2, 'quantized by `gptq` ("quantization_config" in {file})'),
        ({"quantization_config": {}}, 2, 'quantized ("quantization_config" in {file})'),
        ({"hidden_act": "nope"}, 1, 'from {file}: KeyError: \'nope\'. Correct "hidden_act": "nope" there.'),
        (
            {"num_attention_heads": 0},
            1,
            '{file} cannot be used: integer modulo by zero. Correct "num_attention_heads": 0',
        ),
        ({"num_key_value_heads": -1}, 1, 'Correct "num_key_value_heads": -1 there.'),
        ({"vocab_size": None}, 1, 'Correct "vocab_size": null there.'),
    ],
    ids=str,
)
def test_a_config_that_is_wrong_is_told_with_file_and_field(
    wrong: dict[str, object], status: int, words: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    file = shutil.copytree(checkpoint("llama"), tmp_path / "copy") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    assert words.format(file=file) in _refusal(_served(file.parent), status)


@pytest.mark.engine
def test_what_is_logged_on_the_way_to_the_server_is_shown(checkpoint: Callable[[str], Path]) -> None:
    outcome = _served(checkpoint("llama"), "--dtype", "float32", "--skip-tokenizer-init")
    assert _reached(outcome)
    logged = outcome.stdout + outcome.stderr
    assert "KV cache: " in logged
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" in logged


@pytest.mark.engine
def test_dummy_weights_need_no_files(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    bad = BAD_INPUTS["no-weights"](checkpoint("llama"), tmp_path / "bad")
    assert _reached(_served(bad.folder, "--load-format", "dummy", "--skip-tokenizer-init"))["model"] == str(bad.folder)


@pytest.mark.engine
def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    said = _refusal(_served(tmp_path / "nowhere"), 1)
    assert said == f"error: {tmp_path / 'nowhere'} does not exist. Name a folder that holds config.json."


@pytest.mark.engine
def test_a_name_that_is_neither_a_folder_nor_to_be_had_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def out_of_reach(name: str, **_: object) -> str:
        raise LocalEntryNotFoundError(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", out_of_reach)
    said = _refusal(_served("checkpoints/nowhere"), 1)
    assert said.startswith(
        "error: checkpoints/nowhere is not a folder here, and its configuration cannot be had from the hub"
    )


@pytest.mark.engine
def test_an_engine_without_the_plugin_is_not_mistaken_for_us(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    assert "the engine did not load the plugin `tf_backend`" in _refusal(_served(checkpoint("llama")), 1)


@pytest.mark.engine
def test_other_definitions_are_not_ours_to_check(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    (folder / "model.safetensors").write_bytes(b"")
    assert _reached(_served(folder, "--model-impl", "vllm"))["model_impl"] == "vllm"


def _address_taken() -> str:
    import socket

    from tf_backend.cli._serve_server import serve
    from tf_backend.errors import OptionRefused

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        from tf_backend.cli._serve_options import parse

        try:
            serve(parse(["model", "--host", "127.0.0.1", "--port", str(port)], "vllm-cpu"))
        except OptionRefused as refused:
            return str(refused)
    return "it listens"


@pytest.mark.engine
def test_an_address_that_is_taken() -> None:
    warm()
    said = run_in_fork(_address_taken, 120).value()
    assert isinstance(said, str)
    assert said.startswith("the server cannot listen on 127.0.0.1:")
    assert "--port" in said


def _ctrl_c_of_a_loop() -> tuple[list[int], list[str]]:
    import asyncio

    from tf_backend.cli._serve_server import _Loop

    loop, calls = _Loop(), []

    async def wait() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda name: (calls.append(name), stop.set()), number.name)
        signal.raise_signal(signal.SIGINT)
        await asyncio.wait_for(stop.wait(), 10)

    loop.run_until_complete(wait())
    loop.close()
    return loop.received, calls


@pytest.mark.engine
def test_the_loop_knows_which_signal_came() -> None:
    warm()
    assert run_in_fork(_ctrl_c_of_a_loop, 60).value() == ([signal.SIGINT], ["SIGINT"])
