"""Read a model's config, with errors that say what is wrong with it.

In: a folder, or a name on a hub. Out: a transformers config. What can be told from the text alone is told before transformers is imported.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_backend.errors import ConfigError
from tf_backend.model.blame import Blame, find_blame
from tf_backend.spelling import meant_by

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_config(model: str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of `model`.

    Raises:
        ConfigError: as `check_config`; or transformers cannot read it, with the fields that it does not take; or it is a name whose
            config cannot be had.
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
        said = said_of(error)
        file = config_file(str(model))
        blame = Blame() if file is None else _blame(read_values(file))
        if blame:
            raise ConfigError(f"{file} cannot be used: {_gist(said)}. {blame.remedy()}") from error
        raise ConfigError(f"The config of {model} cannot be read: {said}.") from error
    return config


def said_of(error: BaseException) -> str:
    """The text of an error that is not ours, in one line of at most 400 characters, without its full stop."""
    is_text = isinstance(error, KeyError) and " " in str(error)  # which it would show as it shows a key
    return " ".join(str(error.args[0] if is_text else error).split())[:400].rstrip(".")


def config_file(model: str | None) -> Path | None:
    """The config.json of a model that is a folder."""
    file = Path(model or "") / "config.json"
    return file if model and file.is_file() else None


def _blame(values: dict[str, Any]) -> Blame:
    """The fields that keep transformers' own config class from taking `values`."""
    from transformers import CONFIG_MAPPING

    if not _is_known_type(values.get("model_type")) or "auto_map" in values:
        return Blame()
    cls = CONFIG_MAPPING[values["model_type"]]
    return find_blame(values, cls.from_dict)


def _gist(said: str) -> str:
    """Without transformers' word that it is an error of validation, and without what it says of each type that a field may have."""
    return re.sub(r"^(Class v|V)alidation error for \w+ '\w+': \w+: ", "", said).split(". ", 1)[0]


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
    config = read_values(file)
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if "auto_map" in config:
        if not trust_remote_code and not _is_known_type(model_type):
            raise ConfigError(
                f"{file} names Python code that the model brings along. Read that code, then give --trust-remote-code."
            )
        if trust_remote_code:
            return
    if not isinstance(model_type, str):
        found = "no" if model_type is None else f"{json.dumps(model_type)} for"
        raise ConfigError(f'{file} has {found} "model_type". Is it the config.json of a transformers model?')
    if not _is_known_type(model_type):
        raise ConfigError(
            f'{file} has model_type "{model_type}", which transformers {_transformers_version()} does not know'
            f"{_close(model_type, _known_types())}. Correct it, or install a transformers release that has it."
        )
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        found = f', since it has "architectures": {json.dumps(architectures)}' if architectures else ""
        raise ConfigError(
            f'{file} names no architecture{found}. Give it "architectures": ["...ForCausalLM"], the class that the weights are of.'
        )
    if architectures[0] not in _known_classes():
        raise ConfigError(
            f'{file} has the architecture "{architectures[0]}", which transformers {_transformers_version()} does not have'
            f"{_close(architectures[0], _known_architectures())}. Correct it, or install a transformers release that has it."
        )


def read_values(file: Path) -> dict[str, Any]:
    """What is written in config.json; ConfigError where it is no JSON object."""
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


def _known_architectures() -> list[str]:
    """Classes that transformers' tables list as models with a head."""
    from transformers.models.auto import modeling_auto

    tables = (table for name, table in vars(modeling_auto).items() if re.fullmatch("MODEL_.*MAPPING_NAMES", name))
    listed = (names for table in tables for names in dict(table).values())
    return sorted({name for names in listed for name in ((names,) if isinstance(names, str) else names)})


def _transformers_version() -> str:
    from importlib import metadata

    return metadata.version("transformers")


def _close(word: str, known: list[str]) -> str:
    near = meant_by(word, known)
    return f' (is "{near}" meant?)' if near else ""
