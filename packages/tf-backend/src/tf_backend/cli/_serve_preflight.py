"""What would make the engine fail, told before it is started: config, options, plan, checkpoint.

Imports vLLM. In: the parsed options. Out: nothing, or the error; no process has been started by then.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
from pathlib import Path
from typing import Any

from vllm import AsyncEngineArgs
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.usage.usage_lib import UsageContext

from tf_backend.cli._model import folder_of_hub
from tf_backend.cli._present import EngineFailed, fields_of, root_cause
from tf_backend.errors import CheckpointError, ConfigError, ModelRefused, OptionRefused, TfBackendError
from tf_backend.model.config import check_config, looks_local, read_config, read_values
from tf_backend.model.quantized import quantization_in
from tf_backend.model.remote_code import TrustedCode
from tf_backend.model.skeleton import skeleton
from tf_backend.plan import Parallel, plan
from tf_backend.plugin import check_registered

_OTHER_HUBS = ("VLLM_USE_MODELSCOPE", "VLLM_MODEL_REDIRECT_PATH")
"""Variables by which the engine looks for models elsewhere."""
_TOKENIZERS = ("tok", "vocab", "merges", "spiece", "tekken", "bpe", ".model")
"""What the name of a file that belongs to a tokenizer has a part of."""


def preflight(arguments: argparse.Namespace) -> None:
    """Check all that can be checked from the configuration and the headers of the weight files.

    A model that vLLM would serve by a definition of its own (`--model-impl vllm`, or `auto` where it has one) passes unchecked.

    Raises:
        ConfigError, CheckpointError: of a local model, or one that the hub does not have.
        OptionRefused, ModelRefused, CapabilityMismatch: it would not be served, or vLLM does not take the options.
        EngineFailed: something else keeps vLLM from being configured.
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
    _check_tokenizer(config.model_config)


def _check_folder(arguments: argparse.Namespace) -> None:
    """Our errors for a folder's config, where it is read from there and in transformers' format alone."""
    folder = Path(arguments.model)
    if not folder.exists() and looks_local(arguments.model) and "://" not in arguments.model:
        raise ConfigError(f"{arguments.model} does not exist. Name a folder that holds config.json.")
    if _is_of_hub(arguments):
        folder_of_hub(arguments.model, revision=arguments.revision, token=arguments.hf_token)
    if not _is_config_there(arguments):
        return
    check_config(folder, trust_remote_code=arguments.trust_remote_code)
    quantization = quantization_in(folder)  # before the engine reads how, and fails where that is incomplete
    if quantization is not None:
        architectures = read_values(folder / "config.json").get("architectures") or [folder.name]
        raise ModelRefused([quantization.refusal(str(architectures[0]))])


def _check_tokenizer(model_config: Any) -> None:
    """CheckpointError for a folder in which the server would look for a tokenizer, and no file could be one's."""
    folder = Path(model_config.tokenizer)
    if model_config.skip_tokenizer_init or not folder.is_dir():
        return
    names = [file.name.lower() for file in folder.iterdir()]
    if not any(part in name for name in names for part in _TOKENIZERS):
        raise CheckpointError(
            "a folder holds no tokenizer",
            file=folder,
            expected="tokenizer.json, tokenizer.model or vocab.json, and tokenizer_config.json",
            remedy="Put the files there, name a tokenizer with `--tokenizer NAME`, or give `--skip-tokenizer-init`: then prompts and "
            "completions are ids of tokens.",
        )


def _is_of_hub(arguments: argparse.Namespace) -> bool:
    """Whether the engine looks the config up on the hub, by the name alone: it tries for half a minute where the hub is out of reach."""
    is_elsewhere = arguments.hf_config_path is not None or ":" in arguments.model or Path(arguments.model).exists()
    return not is_elsewhere and not any(map(os.environ.get, _OTHER_HUBS))


def _is_config_there(arguments: argparse.Namespace) -> bool:
    """Whether the engine reads the config.json of a folder, as it is."""
    folder = Path(arguments.model)
    is_elsewhere = arguments.hf_config_path is not None or bool(arguments.hf_overrides)
    is_mistral = arguments.config_format == "mistral" or (folder / "params.json").is_file()
    return folder.is_dir() and not is_elsewhere and not is_mistral


def _check_values(arguments: argparse.Namespace) -> None:
    """ConfigError where no model can be made of the config, with the fields that are to blame; ModelRefused where it is not served on so
    many ranks. The engine's error would name neither fields nor numbers of ranks.
    """
    if arguments.model_impl == "transformers" and _is_config_there(arguments):
        is_trusted = arguments.trust_remote_code
        config = read_config(arguments.model, trust_remote_code=is_trusted)
        model = skeleton(config, code=TrustedCode(arguments.model) if is_trusted else None)
        ranks = arguments.tensor_parallel_size
        if ranks > 1:
            planned = plan(model, Parallel(tensor=ranks, experts=arguments.enable_expert_parallel))
            if planned.refusals:
                raise ModelRefused(planned.refusals, architecture=planned.provenance.architecture)


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
        said = fields_of(root_cause(error))
        if said:  # it is what was given that it does not take, and no log says more of that
            raise OptionRefused(f"vLLM does not take these options: {said}. {_advice(arguments.model)}") from error
        raise EngineFailed("being configured", error, advice=_advice(arguments.model)) from error
    finally:
        logging.disable(disabled)


def _advice(model: str) -> str:
    if Path(model).exists():
        return "`tf-backend serve --help=all` lists the options."
    return f"{model} is no folder here, so it was looked up on the hub; download it and name its folder, or see to the connection."
