"""A whole folder against a plan, under each load format: what is looked for, and what is left to the loader."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tf_backend import capabilities
from tf_backend.errors import CheckpointError
from tf_backend.model.config import read_config
from tf_backend.model.skeleton import skeleton
from tf_backend.plan import Parallel
from tf_backend.plan.planner import Planned, make_plan
from tf_backend.weights.checkpoint import check_checkpoint


@pytest.fixture(scope="module")
def planned(good_checkpoint: Path) -> Planned:
    return make_plan(skeleton(read_config(good_checkpoint)), Parallel(), capabilities.shipped())


@pytest.fixture
def empty(good_checkpoint: Path, tmp_path: Path) -> Path:
    shutil.copy(good_checkpoint / "config.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize("load_format", ["auto", "hf", "safetensors"])
def test_a_good_folder_passes_and_one_that_is_cut_short_does_not(
    load_format: str, planned: Planned, good_checkpoint: Path, tmp_path: Path
) -> None:
    check_checkpoint(good_checkpoint, planned, load_format)
    folder = shutil.copytree(good_checkpoint, tmp_path / "cut")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"cut short.*model\.safetensors"):
        check_checkpoint(folder, planned, load_format)


@pytest.mark.parametrize("load_format", ["auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache"])
def test_a_folder_without_weight_files_is_named(load_format: str, planned: Planned, empty: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no weight file") as caught:
        check_checkpoint(empty, planned, load_format)
    assert str(empty) in str(caught.value)
    assert "--load-format dummy" in str(caught.value)


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "runai_streamer", "sharded_state"])
def test_formats_that_need_no_files_of_the_folder_pass(load_format: str, planned: Planned, empty: Path) -> None:
    check_checkpoint(empty, planned, load_format)


def test_files_of_another_kind_count_only_where_they_are_read(planned: Planned, empty: Path) -> None:
    (empty / "pytorch_model.bin").write_bytes(b"anything")
    check_checkpoint(empty, planned, "auto")
    with pytest.raises(CheckpointError, match="holds no weight file"):
        check_checkpoint(empty, planned, "safetensors")


def test_files_in_the_format_of_mistral_are_told_where_they_would_be_taken(
    planned: Planned, good_checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(good_checkpoint, tmp_path / "both")
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"Mistral.*consolidated\.safetensors.*--load-format safetensors"):
        check_checkpoint(folder, planned, "auto")
    check_checkpoint(folder, planned, "safetensors")
