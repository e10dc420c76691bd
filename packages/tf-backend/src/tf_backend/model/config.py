"""Read a model's config, with errors that say what is wrong with it.

In: a folder, or a name on a hub. Out: a transformers config.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from tf_backend.errors import ConfigError


def read_config(model: str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of `model`.

    Raises:
        ConfigError: the folder or its config.json is absent or malformed, its model type is unknown, or it wants code of its own
            to run and `trust_remote_code` is not given.
    """
    folder = Path(model)
    if folder.is_dir():
        _check_folder(folder, trust_remote_code)
    elif folder.is_absolute() or str(model).startswith(".") or str(model).count("/") > 1:
        raise ConfigError(f"There is no folder `{model}`.")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(model), trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many types here; each is a config that cannot be had
        first = str(error).strip().split("\n", 1)[0]
        raise ConfigError(f"The config of `{model}` cannot be read: {first}") from error
    return config


def _check_folder(folder: Path, trust_remote_code: bool) -> None:
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"`{folder}` has no config.json: it is no folder of a transformers model.")
    try:
        data = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        raise ConfigError(f"`{file}` is no JSON: {error}") from error
    if not isinstance(data, dict) or "model_type" not in data:
        raise ConfigError(f"`{file}` names no `model_type`.")
    if data.get("auto_map") and data["model_type"] not in CONFIG_MAPPING and not trust_remote_code:
        raise ConfigError(
            f"`{file}` wants code of its own to run (`auto_map`). Read that code, then pass `--trust-remote-code`."
        )
