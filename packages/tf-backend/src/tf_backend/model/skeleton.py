"""The head model on the meta device: structure, names and shapes, and no memory.

In: a transformers config. Out: a `PreTrainedModel` whose parameters and buffers are on meta.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from tf_backend.errors import ConfigError


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that `config.architectures` names; ConfigError when transformers has none of that name."""
    names: list[str] = list(getattr(config, "architectures", None) or [])
    if not names:
        raise ConfigError(
            f"The config of model type `{config.model_type}` names no architecture. "
            'Add "architectures": ["...ForCausalLM"] to its config.json.'
        )
    found: Any = getattr(transformers, names[0], None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ConfigError(
            f"transformers {transformers.__version__} has no architecture `{names[0]}`. "
            "Correct `architectures` in config.json, or install a transformers release that has it."
        )
    return found


def skeleton(config: PreTrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Build the head model of `config` on meta, in evaluation mode; `config` itself is not changed.

    Raises:
        ConfigError: no such architecture, or its constructor refuses the values.
    """
    cls = model_class(config)
    config = copy.deepcopy(config)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = cls._from_config(config, dtype=dtype or torch.float32, attn_implementation="eager")
    except Exception as error:  # the class's own constructor: whatever it raises, these values do not make a model
        first = " ".join(str(error).split())[:400]
        raise ConfigError(
            f"`{cls.__name__}` cannot be built from its config: {type(error).__name__}: {first}. Correct the values in config.json."
        ) from error
    return model.eval()
