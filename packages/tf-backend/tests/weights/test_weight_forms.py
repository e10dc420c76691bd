"""The forms in which a checkpoint of a causal model may lie in a folder: names of the hub or of the model, with the base model's prefix or
without, in one file or in shards. Every type that has a mapping of its own is tried; what a converter makes of values is held elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tf_backend.plan.conversions import conversion_of
from tf_backend.weights.names import Names
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

Tensors = Mapping[str, torch.Tensor]

MODEL_TYPES = sorted(
    name
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if name in CONFIG_MAPPING and get_checkpoint_conversion_mapping(name)
)

NOT_BARE = {"hy_v4"}
"""A renaming of transformers asks for the dot before a name of the hub: without the prefix it does not know the name, and no more do we."""


def bare(stored: Tensors, model: PreTrainedModel) -> Tensors:
    """As a checkpoint of the base model alone is stored, with the head's own tensors beside it."""
    prefix = f"{model.base_model_prefix}."
    return {name.removeprefix(prefix): tensor for name, tensor in stored.items()}


def legacy(stored: Tensors, model: PreTrainedModel) -> Tensors:
    """Weight and bias of layer norms under the names that they had in TensorFlow."""
    changed = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    return {
        functools.reduce(lambda name, pair: name.replace(*pair), changed.items(), name): tensor
        for name, tensor in stored.items()
    }


FORMS: dict[str, Callable[[Tensors, PreTrainedModel], Tensors]] = {
    "with the prefix": lambda stored, model: stored,
    "without the prefix": bare,
    "names of TensorFlow": legacy,
}


def assert_same(back: Tensors, state: Tensors) -> None:
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert back[name].shape == tensor.shape, name
        assert tensor.is_meta or torch.equal(back[name], tensor), name


def test_types_that_are_only_renamed_are_in_the_list() -> None:
    assert len(MODEL_TYPES) > 40
    assert {"mixtral", "hrm_text"} <= set(MODEL_TYPES)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_form_is_read_back(
    model_type: str, converted_model: Callable[[str], PreTrainedModel], read_back: Callable[[Tensors, Names], Tensors]
) -> None:
    model = converted_model(model_type)
    state = model.state_dict()
    conversion = conversion_of(model, "")
    for stored in (revert_weight_conversion(model, dict(state)), state):
        assert_same(
            read_back(stored, Names(conversion)), state
        )  # where names are not known before the tensors are read
        for form in FORMS.values():
            if form is bare and stored is not state and model_type in NOT_BARE:
                continue
            given = form(stored, model)
            assert_same(read_back(given, Names(conversion, given)), state)


@pytest.mark.parametrize("model_type", ["mixtral", "hrm_text"])
def test_shards_are_read_in_any_order(
    model_type: str,
    tmp_path: Path,
    converted_model: Callable[[str], PreTrainedModel],
    read_back: Callable[[Tensors, Names], Tensors],
) -> None:
    model = converted_model(model_type)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"), reverse=True)
    assert len(shards) > 3
    stored = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    conversion = conversion_of(model, "")
    for names in (Names(conversion, stored), Names(conversion)):
        assert_same(read_back(stored, names), model.state_dict())
