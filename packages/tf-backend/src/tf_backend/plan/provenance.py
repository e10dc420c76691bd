"""What a plan depends on, by hash and version, so that a stale plan can be told.

In: a model, ranks, capabilities. Out: a `Provenance`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tf_backend.capabilities import Capabilities
from tf_backend.plan.schema import Parallel, Provenance

PACKAGES = ("fx-match", "ast-rewrite", "vllm-layers-bridge", "moe-runner", "tf-backend")


def provenance(model: PreTrainedModel, parallel: Parallel, capabilities: Capabilities) -> Provenance:
    """Of a plan for `model`, made now."""
    return Provenance(
        architecture=type(model).__name__,
        model_type=model.config.model_type,
        config_sha256=config_sha256(model.config),
        transformers=transformers.__version__,
        torch=str(torch.__version__),
        packages={name: _version(name) for name in PACKAGES},
        capabilities=capabilities.name,
        capabilities_sha256=capabilities.sha256,
        parallel=parallel,
        sources_sha256=sources_sha256(model),
    )


def config_sha256(config: PreTrainedConfig) -> str:
    """Hash of what a config says of the model: not of where it lies, its dtype, or which release wrote it."""
    data = config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        data.pop(volatile, None)
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "source"


def sources_sha256(model: nn.Module) -> str:
    """Hash of the files in which the model's classes are written, torch's own left out: helpers and constants beside a class count."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    named = {(cls.__module__, file) for cls in classes if (file := _file_of(cls)) is not None}
    digest = hashlib.sha256()
    for name, file in sorted(named):
        digest.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _file_of(cls: type) -> Path | None:
    if cls.__module__.partition(".")[0] in {"torch", "builtins", "typing", "abc"}:
        return None
    try:
        file = inspect.getsourcefile(cls)
    except (TypeError, OSError):
        return None
    return Path(file) if file and Path(file).is_file() else None
