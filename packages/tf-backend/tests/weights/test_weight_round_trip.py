"""Every model type whose checkpoints transformers converts: what it saves is read back as the state dict, tensor by tensor.

The list of types is transformers' own, so that a type which a release adds is tried as well. Models that are too large to make with default
sizes are kept on meta, where names and shapes are held.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tf_backend.plan.conversions import conversion_of
from tf_backend.weights.names import Names
from tf_backend.weights.stream import converted
from tf_tools.checkpoints import SIZES
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

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
    "laguna": ROPE_BY_LAYER,
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 0},
    "mellum": ROPE_BY_LAYER,
    "mimo_v2_flash": ROPE_BY_LAYER,
}
NO_AUTO_CLASS = {"deepseek_ocr2", "qwen3_omni_moe", "step3p5_vision"}
"""Composites that no auto class builds; the models they are made of are in the list."""
SAVED_AS_HELD = {"qwen3_vl_moe"}
"""Old checkpoints alone are stored otherwise: the shape decides."""
LARGEST = 10_000_000
AUTO_CLASSES: tuple[Any, ...] = (AutoModelForCausalLM, AutoModel, AutoModelForImageTextToText)


def has_converter(model_type: str) -> bool:
    transforms = get_checkpoint_conversion_mapping(model_type) or []
    return any(isinstance(transform, WeightConverter) for transform in transforms)


MODEL_TYPES = sorted(set(filter(has_converter, CONFIG_MAPPING)) - NO_AUTO_CLASS)


def configs(model_type: str) -> list[Any]:
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


def build(model_type: str) -> PreTrainedModel:
    for config in configs(model_type):
        for auto in AUTO_CLASSES:
            try:
                with torch.device("meta"):
                    model: PreTrainedModel = auto.from_config(config)
                small = sum(parameter.numel() for parameter in model.parameters()) < LARGEST
                return auto.from_config(config) if small else model
            except Exception:  # no class of this kind, or a constructor that refuses the sizes
                continue
    raise AssertionError(f"{model_type} cannot be built with any of the sizes tried: give it its own in OVERRIDES")


def read(stored: Mapping[str, torch.Tensor], names: Names) -> dict[str, torch.Tensor]:
    arriving = list(stored.items())
    random.Random(0).shuffle(arriving)
    back: dict[str, torch.Tensor] = {}
    for _, name, tensor in converted(arriving, names):
        assert name not in back
        back[name] = tensor
    return back


def shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def test_the_types_that_are_served_are_in_the_list() -> None:
    assert {"mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "jamba", "phimoe", "glm4_moe"} <= set(MODEL_TYPES)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_what_transformers_saves_is_read_back(model_type: str) -> None:
    model = build(model_type)
    state = model.state_dict()
    stored = revert_weight_conversion(model, dict(state))
    assert (shapes(stored) == shapes(state)) is (model_type in SAVED_AS_HELD)
    conversion = conversion_of(model, "")
    for names in (Names(conversion, stored), Names(conversion)):
        back = read(stored, names)
        assert back.keys() == state.keys()
        for name, tensor in state.items():
            assert back[name].shape == tensor.shape, name
            assert tensor.is_meta or torch.equal(back[name], tensor), name


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "jamba", "hrm_text", "qwen3_vl_moe"])
def test_a_checkpoint_in_the_layout_of_the_model_is_read_as_it_stands(model_type: str) -> None:
    model = build(model_type)
    state = model.state_dict()
    for names in (Names(conversion_of(model, ""), state), Names(conversion_of(model, ""))):
        back = read(state, names)
        assert back.keys() == state.keys()
        assert all(tensor.is_meta or torch.equal(back[name], tensor) for name, tensor in state.items())
