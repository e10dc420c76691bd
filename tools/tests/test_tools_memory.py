"""The tool that measures what loading takes: a checkpoint of any size, one load in a fresh process, errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from tf_tools.memory.__main__ import main
from tf_tools.memory._load import measure


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest checkpoint that it makes: one layer and the embeddings, a third of a GiB."""
    folder = tmp_path_factory.mktemp("memory") / "large"
    assert main(["make", str(folder), "--gib", "0.1"]) == 0
    return folder


def test_the_checkpoint_is_whole(large: Path) -> None:
    index = json.loads((large / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.layers.0.mlp.down_proj.weight" in index
    for name, file in index.items():
        with safe_open(large / file, framework="pt") as shard:
            assert shard.get_slice(name).get_dtype() == "BF16"


@pytest.mark.engine
def test_a_load_is_measured(large: Path) -> None:
    load = measure(large, "transformers")
    size = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    assert load.served_by.startswith("tf_backend.")
    assert load.peak >= load.held > size
    assert 0 < load.weights_seconds < load.seconds
    assert load.baseline > 10**8


def test_what_cannot_be_measured_is_one_line(large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path)]) == 2
    assert "holds no config.json" in capsys.readouterr().err
    assert main(["make", str(large)]) == 2
    assert f"error: {large} exists already" in capsys.readouterr().err
    assert main(["make", str(tmp_path / "new"), "--gib", "0"]) == 2
    assert "above 0" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
