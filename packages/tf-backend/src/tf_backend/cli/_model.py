"""From what the user calls a model to a folder with a configuration that transformers knows.

In: a folder or a hub name. Out: a folder, checked far enough that planning starts from a sound config.
"""

from __future__ import annotations

from pathlib import Path

from tf_backend.errors import ConfigError
from tf_backend.model.config import check_config, looks_local


def model_folder(model: str, *, trust_remote_code: bool = False, allow_hub: bool = True) -> Path:
    """The folder that holds the configuration of `model`; raises `ConfigError` for all that is wrong with it.

    A name that is no folder is looked up on the hub (configuration alone; in the local cache when HF_HUB_OFFLINE is set).
    """
    folder = Path(model).expanduser()
    if folder.is_file():
        raise ConfigError(f"{model} is a file. Name the folder that holds config.json.")
    if not folder.is_dir():
        if looks_local(model) or not allow_hub:
            raise ConfigError(f"{model} does not exist. Name a folder that holds config.json.")
        folder = folder_of_hub(model, trust_remote_code=trust_remote_code)
    check_config(folder, trust_remote_code=trust_remote_code)
    return folder


def folder_of_hub(
    name: str, *, trust_remote_code: bool = False, revision: str | None = None, token: str | bool | None = None
) -> Path:
    """The folder in the local cache with the configuration of a model of the hub, downloaded where it is not there; else `ConfigError`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    patterns = ["config.json", "*.py"] if trust_remote_code else ["config.json"]
    absent = f"{name} is not a folder here, and its configuration cannot be had from the hub: "
    instead = "Download the model and name its folder."
    try:
        folder = snapshot_download(name, revision=revision, token=token, allow_patterns=patterns)
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
