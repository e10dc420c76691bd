"""Checkpoints that say that they are quantized, completely or not, wherever they say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tf_backend.errors import ConfigError, ModelRefused
from tf_backend.model.quantized import quantization_in, quantization_of


@pytest.mark.parametrize(
    ("values", "said_in", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "gptq"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", ""),
        ({"quantization_config": {}}, "quantization_config", ""),
        ({"quantization_config": "gptq"}, "quantization_config", ""),
        ({"quantization_config": {"quant_method": 4}}, "quantization_config", ""),
        ({"compression_config": {"quant_method": "sparse"}}, "compression_config", "sparse"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "text_config.quantization_config", "awq"),
    ],
    ids=str,
)
def test_a_config_that_says_so(values: dict[str, Any], said_in: str, method: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = quantization_in(tmp_path)
    assert found is not None
    assert (found.said_in, found.method) == (f'"{said_in}" in {tmp_path / "config.json"}', method)
    said = str(ModelRefused([found.refusal("ToyForCausalLM")]))
    assert said_in in said
    assert f"quantized{f' by `{method}`' if method else ''} (" in said
    assert "Use one that is not quantized" in said


@pytest.mark.parametrize(
    "values", [{}, {"quantization_config": None}, {"text_config": 3}, {"text_config": {"bits": 4}}]
)
def test_a_config_that_does_not(values: dict[str, Any]) -> None:
    assert quantization_of(values) is None


def test_a_file_of_its_own_says_so_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert quantization_in(tmp_path) is None
    (tmp_path / "hf_quant_config.json").write_text("not even JSON")
    found = quantization_in(tmp_path)
    assert found is not None
    assert found.said_in == str(tmp_path / "hf_quant_config.json")


def test_a_config_that_is_no_json_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        quantization_in(tmp_path)
