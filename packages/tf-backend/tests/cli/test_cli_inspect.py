"""`tf-backend inspect`: statuses, output forms, and what it says of a folder that it cannot use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import tf_backend.plan
from tf_backend.cli import main
from tf_backend.cli._model import model_folder
from tf_backend.errors import ConfigError
from tf_backend.plan.schema import Plan, Refusal

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, toy_plan: Plan) -> dict[str, object]:
    """Planning gives the toy plan; what it was asked for is kept."""
    asked: dict[str, object] = {"plan": toy_plan}

    def plan_folder(folder: Path, **options: object) -> object:
        print("a library that prints")
        asked.update(options, folder=folder)
        return asked["plan"]

    monkeypatch.setattr(tf_backend.plan, "plan_folder", plan_folder)
    return asked


def test_json_is_the_plan_and_nothing_else(
    planned: dict[str, object],
    toy_plan: Plan,
    config_folder: Callable[[object], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["inspect", str(config_folder(LLAMA)), "--json"]) == 0
    assert Plan.from_json(capsys.readouterr().out) == toy_plan


def test_served_plan_is_shown_with_status_0(
    planned: dict[str, object], config_folder: Callable[[object], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(config_folder(LLAMA))]) == 0
    out = capsys.readouterr().out
    assert "ToyForCausalLM" in out
    assert "glu_mlp" in out
    assert "gate_up_proj" not in out
    assert out.rstrip().endswith("served")


def test_diff_is_shown_on_request(
    planned: dict[str, object], config_folder: Callable[[object], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(config_folder(LLAMA)), "--diff"]) == 0
    assert "\n+        return self.down_proj(self.act_and_mul(self.gate_up_proj(x)))\n" in capsys.readouterr().out


@pytest.mark.parametrize("form", [[], ["--json"], ["--diff"]])
def test_refused_plan_is_shown_with_status_2(
    form: list[str],
    planned: dict[str, object],
    toy_plan: Plan,
    refusal: Refusal,
    config_folder: Callable[[object], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    planned["plan"] = msgspec.structs.replace(toy_plan, refusals=(refusal,))
    assert main(["inspect", str(config_folder(LLAMA)), *form]) == 2
    out = capsys.readouterr().out
    assert "position_bias" in out
    assert "Serve it with transformers." in out


def test_options_reach_the_planner(
    planned: dict[str, object],
    tmp_path: Path,
    config_folder: Callable[[object], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tf_backend import capabilities

    recorded = msgspec.structs.replace(capabilities.shipped(), name="mine", attention_head_sizes=(8,))
    file = tmp_path / "mine.json"
    file.write_bytes(recorded.to_json())
    options = ["--tensor-parallel-size", "2", "--trust-remote-code", "--capabilities", str(file)]
    assert main(["inspect", str(config_folder(LLAMA)), *options]) == 0
    assert planned["parallel"] == tf_backend.plan.Parallel(tensor=2)
    assert planned["trust_remote_code"] is True
    assert planned["capabilities"] == recorded


def _says(error: str, *words: str) -> None:
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for word in words:
        assert word in error


def test_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "nowhere")]) == 1
    _says(capsys.readouterr().err, "nowhere", "does not exist")


def test_folder_without_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 1
    _says(capsys.readouterr().err, str(tmp_path), "no config.json")


def test_file_in_place_of_a_folder(config_folder: Callable[[object], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(config_folder(LLAMA) / "config.json")]) == 1
    _says(capsys.readouterr().err, "is a file")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", ("is not JSON", "line 1")),
        ("", ("is not JSON",)),
        ([1], ("holds a list",)),
        ({"architectures": ["LlamaForCausalLM"]}, ('no "model_type"',)),
        ({"model_type": 7}, ('7 for "model_type"',)),
        (LLAMA | {"model_type": "lama"}, ('"lama"', 'is "llama" meant?')),
        (LLAMA | {"model_type": "zzzzzz"}, ('"zzzzzz"', "transformers 5.")),
        (LLAMA | {"architectures": ["LamaForCausalLM"]}, ('"LamaForCausalLM"', '"LlamaForCausalLM"')),
        (LLAMA | {"architectures": []}, ("names no architecture",)),
        (LLAMA | {"architectures": "LlamaForCausalLM"}, ("names no architecture, since", '"architectures": "Llama')),
        (LLAMA | {"architectures": None}, ("names no architecture",)),
        ({"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}, ("--trust-remote-code",)),
    ],
)
def test_configuration_that_cannot_be_used(
    config: object, words: tuple[str, ...], config_folder: Callable[[object], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(config_folder(config))]) == 1
    _says(capsys.readouterr().err, *words)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"hidden_act": "nope"}, ("KeyError: 'nope'", 'Correct "hidden_act": "nope" there.')),
        ({"num_attention_heads": 0}, ("by zero", 'Correct "num_attention_heads": 0 there.')),
        ({"num_attention_heads": -4}, ("negative", 'Correct "num_attention_heads": -4 there.')),
        ({"num_attention_heads": 3}, ("not a multiple", 'Correct "num_attention_heads": 3 there.')),
        ({"num_key_value_heads": 0}, ("by zero", 'Correct "num_key_value_heads": 0 there.')),
        ({"hidden_size": 0}, ("`model.embed_tokens.weight` would hold nothing", 'Correct "hidden_size": 0 there.')),
        ({"intermediate_size": 0}, ("would hold nothing", 'Correct "intermediate_size": 0 there.')),
        ({"num_hidden_layers": 0}, ("would have no layers", 'Correct "num_hidden_layers": 0 there.')),
        ({"num_hidden_layers": "two"}, ("expected int, got str", 'Correct "num_hidden_layers": "two" there.')),
        ({"vocab_size": None}, ("expected int, got NoneType", 'Correct "vocab_size": null there.')),
        ({"head_dim": [32]}, ("'head_dim' with value [32]", 'Correct "head_dim": [32] there.')),
        ({"pad_token_id": 999}, ("Padding_idx", 'Correct one of "vocab_size": 256, "pad_token_id": 999 there.')),
        ({"rope_parameters": {"rope_type": "yarn"}}, ("{'factor'}", '"rope_parameters.rope_type": "yarn", or what')),
        ({"hidden_act": "nope", "vocab_size": -1}, ('Correct "vocab_size": -1 and "hidden_act": "nope" there.',)),
        ({"hidden_size": None, "vocab_size": None}, ('Correct "vocab_size": null and "hidden_size": null there.',)),
        ({"dtype": "nope"}, ('Correct "dtype": "nope" there.',)),
        ({"quantization_config": "gptq"}, ('Correct "quantization_config": "gptq" there.',)),
    ],
    ids=str,
)
def test_values_of_which_no_model_can_be_made_are_named(
    wrong: dict[str, object],
    words: tuple[str, ...],
    config_folder: Callable[[object], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = config_folder(LLAMA | wrong)
    assert main(["inspect", str(folder)]) == 1
    _says(capsys.readouterr().err, str(folder / "config.json"), *words)


def test_config_that_is_no_text(config_folder: Callable[[object], Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = config_folder(LLAMA)
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    assert main(["inspect", str(folder)]) == 1
    _says(capsys.readouterr().err, "is not JSON")


@pytest.mark.parametrize("name", ["no-such-owner/no-such-model", "no-such-model"])
def test_hub_name_that_cannot_be_had(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert main(["inspect", name]) == 1
    _says(capsys.readouterr().err, name, "HF_HUB_OFFLINE", "name its folder")


def test_name_that_no_hub_could_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "two words"]) == 1
    _says(capsys.readouterr().err, "two words", "neither a folder nor a name")


def test_hub_is_not_asked_where_only_a_folder_will_do() -> None:
    with pytest.raises(ConfigError, match="owner/model does not exist"):
        model_folder("owner/model", allow_hub=False)


def test_capabilities_file_that_is_none(
    config_folder: Callable[[object], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config_folder(LLAMA)
    assert main(["inspect", str(folder), "--capabilities", str(folder / "config.json")]) == 1
    _says(capsys.readouterr().err, "does not hold capabilities", "capabilities record")


def test_a_real_config_is_planned(config_folder: Callable[[object], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(config_folder(LLAMA)), "--json"]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert plan.provenance.architecture == "LlamaForCausalLM"
    assert len(plan.attention) == 2
    assert plan.is_served
    assert json.loads(plan.to_json())["provenance"]["model_type"] == "llama"
