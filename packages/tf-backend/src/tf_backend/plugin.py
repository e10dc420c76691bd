"""The plugin entry point: vLLM calls `register` in every process, before it resolves a model, possibly several times.

In: nothing. Out: our classes stand under every name of vLLM's transformers backend. What is not served yet is refused by us and never
falls to another implementation by accident.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from tf_backend.errors import OptionRefused
from tf_backend.names import REFUSED, SERVED

AUTO = "TF_BACKEND_AUTO"
"""Environment variable: `0` leaves to vLLM's own backend what `--model-impl auto` sends there by itself.

The engine's config, where our other options are, is not known when models are registered.
"""

COMPILE_AHEAD = "VLLM_USE_AOT_COMPILE"
"""vLLM's environment variable: `1` keeps the compiled model as one artifact."""

logger = logging.getLogger(__name__)


def register() -> None:
    """Register our classes over vLLM's own names. Safe to call again."""
    from vllm.model_executor.models import ModelRegistry

    from tf_backend.model import served

    keep_compiled_code()
    if _is_registered(ModelRegistry, SERVED[0], served.TransformersForCausalLM):
        return
    for name in SERVED:
        ModelRegistry.register_model(name, getattr(served, name))
    for name in REFUSED:
        ModelRegistry.register_model(name, served.refusing_class(name))
    if not takes_auto():
        return
    for architecture, name in _sent_by_architecture().items():
        target = getattr(served, name) if name in SERVED else served.refusing_class(name)
        ModelRegistry.register_model(architecture, target)


def keep_compiled_code() -> None:
    """Let a second start on a CPU find what the first one compiled, unless the environment says how to keep it.

    There vLLM writes its artifact and then fails to load it (its loader asks for a method that only the compiler backend of GPUs has), so
    that each start compiles anew. Without artifacts the compiler's own cache is used, graph by graph.
    """
    from vllm.platforms import current_platform

    if COMPILE_AHEAD in os.environ or not current_platform.is_cpu():
        return
    os.environ[COMPILE_AHEAD] = "0"
    logger.info(
        "%s=0: vLLM on a CPU cannot load the artifacts it would write; set it to 1 to have them.", COMPILE_AHEAD
    )


def takes_auto() -> bool:
    """Whether architectures that vLLM sends to its transformers backend by name are ours; OptionRefused for a value of no meaning."""
    value = os.environ.get(AUTO, "1")
    if value not in {"0", "1"}:
        raise OptionRefused(
            f"{AUTO} is {value!r}, expected 1, or 0 to leave the architectures that vLLM serves through its transformers backend by "
            "itself to that backend."
        )
    return value == "1"


def check_registered() -> None:
    """Without our plugin the engine would quietly serve a model through a backend of its own.

    Raises:
        OptionRefused: vLLM's plugins are loaded in this process, and ours is not among them.
    """
    from vllm.model_executor.models import ModelRegistry

    known: Any = ModelRegistry.models.get(SERVED[0])
    model_class = getattr(known, "model_cls", None)
    module = str(getattr(known, "module_name", "")) if model_class is None else model_class.__module__
    if module.partition(".")[0] != "tf_backend":
        chosen = os.environ.get("VLLM_PLUGINS")
        why = "its entry point is not installed" if chosen is None else f"VLLM_PLUGINS is {chosen!r}"
        raise OptionRefused(
            f"the engine did not load the plugin `tf_backend` ({why}), and would serve this model by other means. Unset "
            "VLLM_PLUGINS, or add `tf_backend` to it; or install the package tf-backend again."
        )


def _is_registered(registry: object, name: str, cls: type) -> bool:
    known = registry.models.get(name)  # type: ignore[attr-defined]
    return known is not None and getattr(known, "model_cls", None) is cls


def _sent_by_architecture() -> dict[str, str]:
    """Architectures that vLLM sends to its transformers backend under `--model-impl auto`, and the class it sends each to."""
    from vllm.model_executor.models import registry

    table = getattr(registry, "_TRANSFORMERS_SUPPORTED_MODELS", {})
    return {architecture: target[1] for architecture, target in table.items()}
