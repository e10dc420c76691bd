"""What cannot be served, or not loaded, is one clear error of ours from the engine, never an answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tf_tools.bad_inputs import BAD_INPUTS
from tf_tools.engine import ServeRequest, ServeResult, serve
from transformers import CONFIG_MAPPING

pytestmark = pytest.mark.engine

PROMPTS = ((5, 6, 7),)
SIZES = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

REFUSED_MODELS = [
    pytest.param(
        "jetmoe", "JetMoeForCausalLM", {"kv_channels": 32, "num_local_experts": 4}, "JetMoeTopKGating", id="experts"
    ),
    pytest.param(
        "falcon_h1",
        "FalconH1ForCausalLM",
        {"head_dim": 32, "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16},
        "FalconH1Mixer",
        id="recurrent",
    ),
]


def folder_of(tmp_path: Path, model_type: str, architecture: str, overrides: dict[str, object]) -> Path:
    config = CONFIG_MAPPING[model_type](**SIZES, **overrides)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    return tmp_path


def refused(folder: Path, **llm_kwargs: object) -> ServeResult:
    result = serve(ServeRequest(folder, prompts=PROMPTS, llm_kwargs=llm_kwargs, runs=1, cached=False))
    assert not result.ok, "it was served"
    return result


@pytest.mark.parametrize(("model_type", "architecture", "overrides", "named"), REFUSED_MODELS)
def test_a_model_of_a_refused_kind(
    model_type: str, architecture: str, overrides: dict[str, object], named: str, tmp_path: Path
) -> None:
    text = refused(folder_of(tmp_path, model_type, architecture, overrides), load_format="dummy").error_text()
    assert "ModelRefused" in text
    assert f"{architecture} cannot be served" in text
    assert named in text


def test_a_pooling_model(checkpoint: Callable[[str], Path]) -> None:
    text = refused(checkpoint("llama"), runner="pooling").error_text()
    assert "tf-backend does not serve pooling models" in text


def test_a_quantized_checkpoint(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "quantized")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {},
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert "does not serve quantized checkpoints" in refused(folder).error_text()


def test_lora(checkpoint: Callable[[str], Path]) -> None:
    assert "LoRA" in refused(checkpoint("llama"), enable_lora=True).error_text()


def test_an_unknown_option_of_ours(checkpoint: Callable[[str], Path]) -> None:
    text = refused(checkpoint("llama"), additional_config={"tf_backend": {"strickt": True}}).error_text()
    assert "OptionRefused" in text
    assert "strickt" in text


@pytest.mark.parametrize("fault", ["missing-shard", "truncated-shard", "wrong-shape", "missing-tensor", "extra-tensor"])
def test_a_broken_checkpoint(fault: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    bad = BAD_INPUTS[fault](checkpoint("llama"), tmp_path / "bad")
    result = refused(bad.folder)
    assert result.failure is not None
    assert result.exit_status != 0
    assert "CheckpointError" in result.error_text()
    assert bad.unsaid(result.failure.message) == []
