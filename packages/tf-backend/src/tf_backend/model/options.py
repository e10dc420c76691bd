"""Options of the engine that change what a model must do: refused by name until they are served.

In: the engine's config. Out: nothing, or an `OptionRefused`. Our own options live in `--additional-config` under the key `tf_backend`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tf_backend.errors import OptionRefused
from tf_backend.plan.schema import Plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "tf_backend"
"""Key of our options in the engine's additional config, which travels to every worker and is part of the compile-cache key."""

OPTIONS: dict[str, type] = {}
"""Options of ours: name -> type."""


def check_engine_options(vllm_config: Any) -> None:
    """Refuse what is not served: quantized checkpoints, LoRA, speculative decoding, sleep mode, weights from a trainer.

    Raises:
        OptionRefused: names the option and what to do.
    """
    if vllm_config.quant_config is not None:
        method = vllm_config.model_config.quantization
        if getattr(vllm_config.model_config.hf_config, "quantization_config", None) is None:
            raise OptionRefused(
                f"tf-backend does not serve weights that are quantized when they are loaded yet. Leave out `--quantization {method}`, "
                "or use `--model-impl vllm`."
            )
        raise OptionRefused(
            f"tf-backend does not serve quantized checkpoints yet, and this one is quantized by `{method}`. "
            "Use a checkpoint that is not quantized, or `--model-impl vllm`."
        )
    if vllm_config.lora_config is not None:
        raise OptionRefused(
            "tf-backend does not serve LoRA adapters yet. Leave out `--enable-lora`, or use `--model-impl vllm`."
        )
    if vllm_config.speculative_config is not None:
        raise OptionRefused(
            "tf-backend does not serve speculative decoding yet. Leave out `--speculative-config`, or use `--model-impl vllm`."
        )
    _check_stages(vllm_config)
    _check_weight_options(vllm_config)
    own = (vllm_config.additional_config or {}).get(KEY, {})
    unknown = sorted(set(own) - set(OPTIONS) - {"plan"}) if isinstance(own, dict) else [str(own)]
    if unknown:
        raise OptionRefused(
            f"`--additional-config` has options under `{KEY}` that tf-backend does not know: {', '.join(unknown)}. "
            f"It knows: {', '.join(OPTIONS) or 'none yet'}."
        )


def _check_stages(vllm_config: VllmConfig) -> None:
    """vLLM's runner on the CPU makes room for the hidden states that a stage receives when it compiles, and at no other time."""
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    is_staged = vllm_config.parallel_config.pipeline_parallel_size > 1
    if is_staged and current_platform.is_cpu() and vllm_config.compilation_config.mode == CompilationMode.NONE:
        raise OptionRefused(
            "vLLM's CPU engine runs pipeline stages only compiled, and `--enforce-eager` is given. Leave it out, or set "
            "`--pipeline-parallel-size` to 1."
        )


def _check_weight_options(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    if vllm_config.model_config.enable_sleep_mode:
        raise OptionRefused(
            "tf-backend does not serve sleep mode yet: it is not shown that all that a model holds comes back when it wakes up. "
            "Leave out `--enable-sleep-mode`, or use `--model-impl vllm`."
        )
    if vllm_config.weight_transfer_config is not None:
        raise OptionRefused(
            "tf-backend does not take weights from a trainer yet: they arrive in parts, and it takes whole checkpoints alone. "
            "Leave out `--weight-transfer-config` and use `reload_weights`, or use `--model-impl vllm`."
        )
    if parallel.enable_expert_parallel and parallel.enable_ep_weight_filter:
        raise OptionRefused(
            "tf-backend reads the weights of all experts, and `--enable-ep-weight-filter` keeps those of other ranks from it. "
            "Leave the option out."
        )


def publish_plan(vllm_config: Any, plan: Plan) -> None:
    """Make the plan's hash part of the compile-cache key, before anything compiles.

    The cache hashes the files that were traced and the config; it does not see rewritten sources, which the plan's hash covers.
    """
    additional = dict(vllm_config.additional_config or {})
    additional[KEY] = {**additional.get(KEY, {}), "plan": plan.hash}
    vllm_config.additional_config = additional
