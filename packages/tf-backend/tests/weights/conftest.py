"""One good checkpoint and its plan, for the tests that break it; tiny models of all types whose checkpoints are converted."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tf_backend.plan import plan_folder
from tf_backend.plan.schema import Plan
from tf_backend.weights.names import Names
from tf_backend.weights.stream import converted
from tf_tools.checkpoints import SIZES, make_checkpoint
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "head_dim": 32,
    "pad_token_id": 0,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 500.0}
ROPE_BY_LAYER = {"rope_parameters": {"full_attention": PLAIN_ROPE, "sliding_attention": PLAIN_ROPE}}
OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["full_attention", "sliding_attention"]},
    "laguna": ROPE_BY_LAYER,
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 0},
    "mellum": ROPE_BY_LAYER,
    "mimo_v2_flash": ROPE_BY_LAYER,
}
LARGEST = 10_000_000
AUTO_CLASSES: tuple[Any, ...] = (AutoModelForCausalLM, AutoModel, AutoModelForImageTextToText)


@pytest.fixture(scope="session")
def good_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("checkpoints") / "good")


@pytest.fixture(scope="session")
def good_plan(good_checkpoint: Path) -> Plan:
    return plan_folder(good_checkpoint)


def _configs(model_type: str) -> list[Any]:
    """From small to the class's own sizes: some classes hold their values against each other and take only the latter."""
    kind = CONFIG_MAPPING[model_type]
    found = []
    for sizes in ({**SIZES, **EXPERTS, **OVERRIDES.get(model_type, {})}, {"num_hidden_layers": 2}):
        try:
            parts = {part: copy.deepcopy(sizes) for part in getattr(kind, "sub_configs", {})}
            found.append(kind(**copy.deepcopy(sizes), **parts))
        except Exception:  # the class's own checks: of values, of keywords, of their types
            continue
    return found


def _build(model_type: str) -> PreTrainedModel:
    for config in _configs(model_type):
        for auto in AUTO_CLASSES:
            try:
                with torch.device("meta"):
                    model: PreTrainedModel = auto.from_config(config)
                small = sum(parameter.numel() for parameter in model.parameters()) < LARGEST
                return auto.from_config(config) if small else model
            except Exception:  # no class of this kind, or a constructor that refuses the sizes
                continue
    raise AssertionError(f"{model_type} cannot be built with any of the sizes tried: give it its own in OVERRIDES")


@pytest.fixture(scope="session")
def converted_model() -> Callable[[str], PreTrainedModel]:
    """A tiny model of a type, with numbers where its sizes are small and on meta where they are not."""
    return _build


@pytest.fixture(scope="session")
def read_back() -> Callable[[Mapping[str, torch.Tensor], Names], dict[str, torch.Tensor]]:
    """``read_back(stored, names)``: a checkpoint's tensors, arriving in a drawn order, under the model's names; none comes twice."""

    def read(stored: Mapping[str, torch.Tensor], names: Names) -> dict[str, torch.Tensor]:
        arriving = list(stored.items())
        random.Random(0).shuffle(arriving)
        back: dict[str, torch.Tensor] = {}
        for _, name, tensor in converted(arriving, names):
            assert name not in back
            back[name] = tensor
        return back

    return read
