"""Checkpoints on disk against a plan: good ones in every form, and each broken one with what its error must say."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tf_backend import capabilities
from tf_backend.errors import CheckpointError, TfBackendError
from tf_backend.model.config import read_config
from tf_backend.model.skeleton import skeleton
from tf_backend.plan import Parallel, plan_folder
from tf_backend.plan.planner import make_plan
from tf_backend.plan.schema import Plan
from tf_backend.weights.files import stored_tensors
from tf_backend.weights.load import WeightLoader
from tf_tools.bad_inputs import BAD_INPUTS
from tf_tools.checkpoints import make_checkpoint

BEFORE_WEIGHTS = {"no-config", "not-json", "unknown-architecture", "unknown-model-type"}


def check(folder: Path, plan: Plan) -> int:
    stored = stored_tensors(folder)
    WeightLoader(plan.weights, plan.base, ignorable=plan.buffers).check(stored)
    return len(stored)


def test_a_good_checkpoint_fits(good_checkpoint: Path, good_plan: Plan) -> None:
    assert check(good_checkpoint, good_plan) == len({rule.source for rule in good_plan.weights})


def test_shards_fit(tmp_path: Path, good_plan: Plan) -> None:
    folder = make_checkpoint("llama", tmp_path / "shards", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert check(folder, good_plan)


def test_a_checkpoint_of_the_bare_decoder_fits(tmp_path: Path, good_plan: Plan) -> None:
    assert check(make_checkpoint("llama", tmp_path / "bare", drop_base_prefix=True), good_plan)


@pytest.mark.parametrize("name", ["llama-tied", "qwen3", "gemma2", "phi", "smollm3"])
def test_other_checkpoints_fit(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(name, tmp_path / name)
    assert check(folder, plan_folder(folder))


def test_old_checkpoints_hold_rotary_buffers_in_every_layer(good_checkpoint: Path) -> None:
    model = skeleton(read_config(good_checkpoint))
    planned = make_plan(model, Parallel(), capabilities.shipped())
    loader = WeightLoader(planned.plan.weights, planned.plan.base, planned.plan.buffers, planned.ignorable_patterns)
    stored = stored_tensors(good_checkpoint)
    anything = next(iter(stored.values()))
    loader.check({**stored, "model.layers.0.self_attn.rotary_emb.inv_freq": anything})
    with pytest.raises(TfBackendError, match="other_freq"):
        loader.check({**stored, "model.layers.0.self_attn.rotary_emb.other_freq": anything})


@pytest.mark.parametrize("name", sorted(BAD_INPUTS.keys() - BEFORE_WEIGHTS - {"no-weights"}))
def test_broken_weights_are_told_from_headers_alone(name: str, tmp_path: Path, good_checkpoint: Path) -> None:
    bad = BAD_INPUTS[name](good_checkpoint, tmp_path / "bad")
    plan = plan_folder(bad.folder)
    with pytest.raises(TfBackendError) as caught:
        check(bad.folder, plan)
    assert bad.unsaid(str(caught.value)) == []


@pytest.mark.parametrize("name", sorted(BEFORE_WEIGHTS))
def test_broken_configs_are_told_before(name: str, tmp_path: Path, good_checkpoint: Path) -> None:
    bad = BAD_INPUTS[name](good_checkpoint, tmp_path / "bad")
    with pytest.raises(TfBackendError) as caught:
        plan_folder(bad.folder)
    assert bad.unsaid(str(caught.value)) == []


def test_a_folder_without_weights_lacks_every_tensor(tmp_path: Path, good_checkpoint: Path, good_plan: Plan) -> None:
    bad = BAD_INPUTS["no-weights"](good_checkpoint, tmp_path / "bad")
    with pytest.raises(TfBackendError, match="lacks"):
        check(bad.folder, good_plan)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "I8"}, "cannot be converted without a scale"),
        ({"dtype": "F8_E4M3"}, "cannot be converted without a scale"),
        ({"shape": (64, 64)}, "another shape than most of the 4 that are stacked"),
    ],
)
def test_one_expert_of_a_layer_that_is_not_as_the_others_is_named(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder = make_checkpoint("mixtral", tmp_path / "experts", overrides={"num_local_experts": 4})
    planned = make_plan(skeleton(read_config(folder)), Parallel(), capabilities.shipped())
    loader = WeightLoader(planned.plan.weights, planned.plan.base, planned.plan.buffers, conversion=planned.conversion)
    stored = stored_tensors(folder)
    loader.check(stored)
    (name,) = (name for name in stored if ".1." in name and "experts.2.w2" in name)
    with pytest.raises(CheckpointError, match=said) as caught:
        loader.check({**stored, name: dataclasses.replace(stored[name], **changes)})
    assert caught.value.tensor == name
    assert Path(str(caught.value.file)).parent == folder
