"""Python code that a model brings along (`auto_map` in its config): imported where the user trusts it, as transformers does.

In: a config and where its code lies. Out: the model's own class, or None where it brings none for a causal language model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from tf_backend.errors import ConfigError

AUTO_CLASS = "AutoModelForCausalLM"


@dataclass(frozen=True, slots=True)
class TrustedCode:
    """Where trusted code lies: a folder or a hub name, and there the revisions of model and code."""

    name: str
    revision: str | None = None
    code_revision: str | None = None


def remote_class(config: PreTrainedConfig, code: TrustedCode | None) -> type[PreTrainedModel] | None:
    """The class that `config.auto_map` names.

    As in transformers, trusted code goes before a class of the library; without trust nothing of it is imported.

    Raises:
        ConfigError: the code cannot be imported, or what it names is no model.
    """
    reference = (getattr(config, "auto_map", None) or {}).get(AUTO_CLASS)
    if code is None or reference is None:
        return None
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    try:
        found: Any = get_class_from_dynamic_module(
            reference, code.name, revision=code.revision, code_revision=code.code_revision
        )
    except Exception as error:  # code of the model's own: whatever it raises when it is imported
        first = " ".join(str(error).split())[:400]
        raise ConfigError(
            f"The Python code of {code.name} cannot be imported: `{reference}` raises {type(error).__name__}: {first}."
        ) from error
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ConfigError(f"`{reference}` in the Python code of {code.name} is no `PreTrainedModel`.")
    return found
