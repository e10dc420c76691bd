"""Read a model's config, with errors that say what is wrong with it.

In: a folder, or a name on a hub. Out: a transformers config. What can be told from the text alone is told before transformers is imported.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_backend.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_config(model: str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of `model`.

    Raises:
        ConfigError: as `check_config`; or transformers cannot read it, or it is a name whose config cannot be had.
    """
    folder = Path(model)
    if folder.is_dir():
        check_config(folder, trust_remote_code=trust_remote_code)
    elif looks_local(str(model)):
        raise ConfigError(f"{model} does not exist. Name a folder that holds config.json.")
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(model), trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many types here; each is a config that cannot be had
        first = " ".join(str(error).split())[:400]  # one line: transformers puts the reason on a later one
        raise ConfigError(f"The config of {model} cannot be read: {first}") from error
    return config


def looks_local(model: str) -> bool:
    """Whether a name that is no folder can only have been meant as one: no hub has a model of that name."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def check_config(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Hold config.json in `folder` against what transformers has.

    Raises:
        ConfigError: it is missing, is not a JSON object, names a model type or an architecture that transformers does not have, or
            names code of its own and `trust_remote_code` is not given.
    """
    file = folder / "config.json"
    config = _read(file)
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if "auto_map" in config:
        if not trust_remote_code and not _is_known_type(model_type):
            raise ConfigError(
                f"{file} names Python code that the model brings along. Read that code, then give --trust-remote-code."
            )
        if trust_remote_code:
            return
    if not isinstance(model_type, str):
        raise ConfigError(f'{file} has no "model_type". Is it the config.json of a transformers model?')
    if not _is_known_type(model_type):
        raise ConfigError(
            f'{file} has model_type "{model_type}", which transformers {_transformers_version()} does not know'
            f"{_close(model_type, _known_types())}. Correct it, or install a transformers release that has it."
        )
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ConfigError(
            f'{file} names no architecture. Add "architectures": ["...ForCausalLM"], the class that the weights are of.'
        )
    if architectures[0] not in _known_classes():
        raise ConfigError(
            f'{file} has the architecture "{architectures[0]}", which transformers {_transformers_version()} does not have'
            f"{_close(architectures[0], _known_classes())}. Correct it, or install a transformers release that has it."
        )


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{file.parent} has no config.json. Name the folder of a transformers model.") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON ({error}). Download it again.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds a {type(config).__name__} where a JSON object is wanted. Download it again.")
    return config


def _is_known_type(model_type: object) -> bool:
    return isinstance(model_type, str) and model_type in _known_types()


def _known_types() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return list(CONFIG_MAPPING_NAMES)


def _known_classes() -> list[str]:
    import transformers

    return dir(transformers)


def _transformers_version() -> str:
    from importlib import metadata

    return metadata.version("transformers")


def _close(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f' (the nearest that it knows is "{near[0]}")' if near else ""
