"""What we do with vLLM that it does not offer, each entry with its reason. An entry that nothing uses any more is an error.

Rules: vLLM's layers are used, never subclassed or patched, and there is no entry that allows it. Reading a private name, deriving from
another class of vLLM and writing to an object that vLLM handed us need an entry here. Changing vLLM itself (an attribute of a module, a
class, or a table that all models share) is a patch and needs one in `PATCHES`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patch:
    """A change to vLLM: `why` it cannot be done without, `how` it is done, `upstream` reference, and `until` what removes it."""

    path: str
    why: str
    how: str
    upstream: str
    until: str


PATCHES: tuple[Patch, ...] = ()
"""None."""

PRIVATE: dict[str, str] = {
    "vllm:_custom_ops": "the CPU's latent decode kernel states the sizes that it takes nowhere: it is run to see",
    "vllm.model_executor.models:registry._TRANSFORMERS_SUPPORTED_MODELS": (
        "the only list of architectures that vLLM sends to its transformers backend by name"
    ),
    "vllm.model_executor.models.registry:_RegisteredModel": "the registry has no public way to ask which class stands under a name",
    "vllm.model_executor.models.registry:_LazyRegisteredModel": "likewise, for a class that is not imported yet",
}
"""Private names that are read: path up to the name -> why."""

DERIVED: dict[str, str] = {
    "vllm.utils.argparse_utils:FlexibleArgumentParser": "its `error` ends the process with the status that here means a refused model",
}
"""Classes of vLLM that ours derive from, never a layer -> why."""

WRITTEN: dict[str, str] = {
    "vllm.config:VllmConfig().additional_config": "the plan's hash must be in the compile cache's key before anything compiles",
    "vllm.config:get_current_vllm_config().compilation_config.static_forward_context": (
        "an opaque operation finds its layer there by name, as those of vLLM's own layers do"
    ),
    "vllm.entrypoints.cli.serve:ServeSubcommand().subparser_init().usage": "the help names our command",
    "vllm.entrypoints.cli.serve:ServeSubcommand().subparser_init().epilog": "the help names our command",
}
"""Attributes of objects that vLLM hands us, and that we set -> why."""

DYNAMIC: dict[str, str] = {
    "vllm-serve": "options of memory are compared with their defaults one after the other, by names that stand beside it",
}
"""Things of vLLM from which a name is read that is not literal, so that nobody can check it -> why."""

PASSED_ON: dict[str, frozenset[str]] = {
    # The backend's implementation takes them by name, and one that does not know them raises when it is built.
    "vllm.model_executor.layers.attention:Attention": frozenset({"sinks"}),
}
"""Keywords that only ``**`` takes, and that are passed on to something that checks them: path of the callable -> names."""
