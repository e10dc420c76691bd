"""Every model type whose checkpoints transformers converts: what it saves is read back as the state dict, tensor by tensor.

The list of types is transformers' own, so that a type which a release adds is tried as well. Models that are too large to make with default
sizes are kept on meta, where names and shapes are held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from tf_backend.plan.conversions import conversion_of
from tf_backend.weights.names import Names
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

NO_AUTO_CLASS = {"deepseek_ocr2", "qwen3_omni_moe", "step3p5_vision"}
"""Composites that no auto class builds; the models they are made of are in the list."""
SAVED_AS_HELD = {"qwen3_vl_moe"}
"""Old checkpoints alone are stored otherwise: the shape decides."""


ReadBack = Callable[[Mapping[str, torch.Tensor], Names], dict[str, torch.Tensor]]
Build = Callable[[str], PreTrainedModel]


def has_converter(model_type: str) -> bool:
    transforms = get_checkpoint_conversion_mapping(model_type) or []
    return any(isinstance(transform, WeightConverter) for transform in transforms)


MODEL_TYPES = sorted(set(filter(has_converter, CONFIG_MAPPING)) - NO_AUTO_CLASS)


def shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def test_the_types_that_are_served_are_in_the_list() -> None:
    assert {"mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "jamba", "phimoe", "glm4_moe"} <= set(MODEL_TYPES)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_what_transformers_saves_is_read_back(model_type: str, converted_model: Build, read_back: ReadBack) -> None:
    model = converted_model(model_type)
    state = model.state_dict()
    stored = revert_weight_conversion(model, dict(state))
    assert (shapes(stored) == shapes(state)) is (model_type in SAVED_AS_HELD)
    conversion = conversion_of(model, "")
    for names in (Names(conversion, stored), Names(conversion)):
        back = read_back(stored, names)
        assert back.keys() == state.keys()
        for name, tensor in state.items():
            assert back[name].shape == tensor.shape, name
            assert tensor.is_meta or torch.equal(back[name], tensor), name


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "jamba", "hrm_text", "qwen3_vl_moe"])
def test_a_checkpoint_in_the_layout_of_the_model_is_read_as_it_stands(
    model_type: str, converted_model: Build, read_back: ReadBack
) -> None:
    model = converted_model(model_type)
    state = model.state_dict()
    for names in (Names(conversion_of(model, ""), state), Names(conversion_of(model, ""))):
        back = read_back(state, names)
        assert back.keys() == state.keys()
        assert all(tensor.is_meta or torch.equal(back[name], tensor) for name, tensor in state.items())
