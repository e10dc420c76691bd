"""The head model on the meta device: structure, names and shapes, and no memory.

In: a transformers config. Out: a `PreTrainedModel` whose parameters and buffers are on meta.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from tf_backend.errors import ConfigError
from tf_backend.model.blame import Blame, find_blame
from tf_backend.model.config import config_file, read_values, said_of
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
        ConfigError: no such architecture, its constructor refuses the values, or they leave a part of it empty; names the fields.
    """
    cls = model_class(config, code)
    file = config_file(config.name_or_path)
    try:
        model = build(cls, config, dtype)
    except Exception as error:  # the class's own constructor: whatever it raises, these values do not make a model
        said = f"`{cls.__name__}` cannot be built from {file or 'its config'}: {type(error).__name__}: {said_of(error)}"
        remedy = "Correct the values in config.json." if file is None else _blame(cls, config, file).remedy()
        raise ConfigError(f"{said}. {remedy}") from error
    lacking = _lacking(model)
    if lacking and file is not None and (blame := _blame(cls, config, file)):
        raise ConfigError(f"`{cls.__name__}` cannot be built from {file}: {lacking}. {blame.remedy()}")
    return model.eval()


def build(cls: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A model of `cls` on meta; raises whatever its constructor does."""
    config = copy.deepcopy(config)
    _restore_unused_window(config)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # said below, with the field
        model: PreTrainedModel = cls._from_config(config, dtype=dtype or torch.float32, attn_implementation="eager")
    return model


def _lacking(model: PreTrainedModel) -> str:
    """What a model of sizes that are zero lacks; transformers builds it all the same."""
    empty = next((name for name, tensor in model.named_parameters() if not tensor.numel()), "")
    if empty:
        return f"`{empty}` would hold nothing, at the shape {list(model.get_parameter(empty).shape)}"
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return "it would have no layers" if lists and not any(map(len, lists)) else ""


def _blame(cls: type[PreTrainedModel], config: PreTrainedConfig, file: Path) -> Blame:
    """The fields of the file from which `config` was read that keep `cls` from being built whole."""

    def attempt(values: dict[str, Any]) -> None:
        lacking = _lacking(build(cls, type(config).from_dict(values)))
        if lacking:
            raise ValueError(lacking)

    return find_blame(read_values(file), attempt)


def _restore_unused_window(config: PreTrainedConfig) -> None:
    """Undo that the engine writes None where a config class says 0, a window that is not used.

    Models that make the mask of such layers, though they have none, need a number.
    """
    if getattr(config, "sliding_window", 0) is None:
        with contextlib.suppress(Exception):  # a config whose class does not take its own values back stays as it is
            if type(config).from_dict(config.to_dict()).sliding_window == 0:
                config.sliding_window = 0
