"""From what the user calls a model to a folder with a configuration that transformers knows.

In: a folder or a hub name. Out: a folder, checked far enough that planning starts from a sound config.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from tf_backend.errors import ConfigError


def model_folder(model: str, *, trust_remote_code: bool = False, allow_hub: bool = True) -> Path:
    """The folder that holds the configuration of `model`; raises `ConfigError` for all that is wrong with it.

    A name that is no folder is looked up on the hub (configuration alone; in the local cache when HF_HUB_OFFLINE is set).
    """
    folder = Path(model).expanduser()
    if folder.is_file():
        raise ConfigError(f"{model} is a file. Name the folder that holds config.json.")
    if not folder.is_dir():
        looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1 or not allow_hub
        if looks_local:
            raise ConfigError(f"{model} does not exist. Name a folder that holds config.json.")
        folder = _from_hub(model, trust_remote_code)
    check_config(folder, trust_remote_code=trust_remote_code)
    return folder


def _from_hub(name: str, trust_remote_code: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    patterns = ["config.json", "*.py"] if trust_remote_code else ["config.json"]
    absent = f"{name} is not a folder here, and its configuration cannot be had from the hub: "
    instead = "Download the model and name its folder."
    try:
        folder = snapshot_download(name, allow_patterns=patterns)
    except HFValidationError as error:
        raise ConfigError(
            f"{name!r} is neither a folder nor a name that the hub could have. Name a folder that holds config.json."
        ) from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{absent}the hub is out of reach or HF_HUB_OFFLINE is set, and there is no copy in the local cache. {instead}"
        ) from error
    except RepositoryNotFoundError as error:  # and gated ones
        raise ConfigError(f"{absent}there is no such model, or it needs `hf auth login`. {instead}") from error
    except Exception as error:  # the hub's client lets errors of several HTTP libraries through
        said = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"{absent}{type(error).__name__}: {said}. {instead}") from error
    return Path(folder)


def check_config(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Raise `ConfigError` when config.json is missing, is not a JSON object, or names what transformers does not have."""
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
    except ValueError as error:
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
