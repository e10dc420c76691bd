"""What would make the engine fail, told before it is started: config, options, plan, checkpoint.

Imports vLLM. In: the parsed options. Out: nothing, or the error; no process has been started by then.
"""

from __future__ import annotations

import argparse
import copy
import logging
from pathlib import Path
from typing import Any

from vllm import AsyncEngineArgs
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.usage.usage_lib import UsageContext

from tf_backend.cli._present import EngineFailed
from tf_backend.errors import ConfigError, ModelRefused, OptionRefused, TfBackendError
from tf_backend.model.config import check_config, looks_local, read_config, read_values
from tf_backend.model.quantized import quantization_in
from tf_backend.model.remote_code import TrustedCode
from tf_backend.model.skeleton import skeleton
from tf_backend.plugin import check_registered


def preflight(arguments: argparse.Namespace) -> None:
    """Check all that can be checked from the configuration and the headers of the weight files.

    A model that vLLM would serve by a definition of its own (`--model-impl vllm`, or `auto` where it has one) passes unchecked.

    Raises:
        ConfigError, CheckpointError: of a local model.
        OptionRefused, ModelRefused, CapabilityMismatch: it would not be served.
        EngineFailed: vLLM does not take the options.
    """
    if arguments.model_impl == "transformers":
        _check_folder(arguments)
    config = _engine_config(arguments)
    if not config.model_config.using_transformers_backend():
        if arguments.model_impl == "transformers":
            chosen = config.model_config.architecture
            raise OptionRefused(
                f"vLLM would serve this model as {chosen}, by a definition of its own. Give `--model-impl vllm` if that is meant."
            )
        return
    check_registered()
    model_class: Any = get_model_cls(config.model_config)
    model_class.check(config)


def _check_folder(arguments: argparse.Namespace) -> None:
    """Our errors for a folder's config, where it is read from there and in transformers' format alone."""
    folder = Path(arguments.model)
    if not folder.exists() and looks_local(arguments.model) and "://" not in arguments.model:
        raise ConfigError(f"{arguments.model} does not exist. Name a folder that holds config.json.")
    if not _is_config_there(arguments):
        return
    check_config(folder, trust_remote_code=arguments.trust_remote_code)
    quantization = quantization_in(folder)  # before the engine reads how, and fails where that is incomplete
    if quantization is not None:
        architectures = read_values(folder / "config.json").get("architectures") or [folder.name]
        raise ModelRefused([quantization.refusal(str(architectures[0]))])


def _is_config_there(arguments: argparse.Namespace) -> bool:
    """Whether the engine reads the config.json of a folder, as it is."""
    folder = Path(arguments.model)
    is_elsewhere = arguments.hf_config_path is not None or bool(arguments.hf_overrides)
    is_mistral = arguments.config_format == "mistral" or (folder / "params.json").is_file()
    return folder.is_dir() and not is_elsewhere and not is_mistral


def _check_values(arguments: argparse.Namespace) -> None:
    """ConfigError where no model can be made of the config, with the fields that are to blame; the engine's error would not name them."""
    if arguments.model_impl == "transformers" and _is_config_there(arguments):
        is_trusted = arguments.trust_remote_code
        config = read_config(arguments.model, trust_remote_code=is_trusted)
        skeleton(config, code=TrustedCode(arguments.model) if is_trusted else None)


def _engine_config(arguments: argparse.Namespace) -> Any:
    """The engine's config, made once more than vLLM will: from a copy, since making one changes its parts, and without its log."""
    disabled = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        engine = AsyncEngineArgs.from_cli_args(copy.deepcopy(arguments))
        return engine.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER, headless=arguments.headless)
    except TfBackendError:
        raise
    except Exception as error:  # vLLM's own checks: pydantic's, ValueError, and others
        _check_values(arguments)
        raise EngineFailed("being configured", error, advice=_advice(arguments.model)) from error
    finally:
        logging.disable(disabled)


def _advice(model: str) -> str:
    if Path(model).exists():
        return "`tf-backend serve --help=all` lists the options."
    return f"{model} is no folder here, so it was looked up on the hub; download it and name its folder, or see to the connection."
