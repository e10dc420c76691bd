"""The head model on the meta device: structure, names and shapes, and no memory.

In: a transformers config. Out: a `PreTrainedModel` whose parameters and buffers are on meta.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from tf_backend.errors import ConfigError
from tf_backend.model.remote_code import AUTO_CLASS, TrustedCode, remote_class


def model_class(config: PreTrainedConfig, code: TrustedCode | None = None) -> type[PreTrainedModel]:
    """The class that `config.architectures` names, or that trusted code brings; ConfigError when there is none."""
    own = remote_class(config, code)
    if own is not None:
        return own
    names: list[str] = list(getattr(config, "architectures", None) or [])
    if not names:
        raise ConfigError(
            f"The config of model type `{config.model_type}` names no architecture. "
            'Add "architectures": ["...ForCausalLM"] to its config.json.'
        )
    found: Any = getattr(transformers, names[0], None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        if getattr(config, "auto_map", None):
            raise ConfigError(
                f"`{names[0]}` is no architecture of transformers {transformers.__version__}, and config.json names no Python code for "
                f"`{AUTO_CLASS}` that is trusted. Read the code that the model brings along, then give --trust-remote-code."
            )
        raise ConfigError(
            f"transformers {transformers.__version__} has no architecture `{names[0]}`. "
            "Correct `architectures` in config.json, or install a transformers release that has it."
        )
    return found


def skeleton(
    config: PreTrainedConfig, dtype: torch.dtype | None = None, code: TrustedCode | None = None
) -> PreTrainedModel:
    """Build the head model of `config` on meta, in evaluation mode; `config` itself is not changed.

    Args:
        code: the model's own Python code, where the user trusts it.

    Raises:
        ConfigError: no such architecture, or its constructor refuses the values.
    """
    cls = model_class(config, code)
    config = copy.deepcopy(config)
    _restore_unused_window(config)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = cls._from_config(config, dtype=dtype or torch.float32, attn_implementation="eager")
    except Exception as error:  # the class's own constructor: whatever it raises, these values do not make a model
        first = " ".join(str(error).split())[:400]
        raise ConfigError(
            f"`{cls.__name__}` cannot be built from its config: {type(error).__name__}: {first}. Correct the values in config.json."
        ) from error
    return model.eval()


def _restore_unused_window(config: PreTrainedConfig) -> None:
    """Undo that the engine writes None where a config class says 0, a window that is not used.

    Models that make the mask of such layers, though they have none, need a number.
    """
    if getattr(config, "sliding_window", 0) is None:
        with contextlib.suppress(Exception):  # a config whose class does not take its own values back stays as it is
            if type(config).from_dict(config.to_dict()).sliding_window == 0:
                config.sliding_window = 0
