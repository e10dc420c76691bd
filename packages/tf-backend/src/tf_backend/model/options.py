"""Options of the engine that change what a model must do: refused by name until they are served.

In: the engine's config. Out: nothing, or an `OptionRefused`. Our own options live in `--additional-config` under the key `tf_backend`.
"""

from __future__ import annotations

from typing import Any

from tf_backend.errors import OptionRefused
from tf_backend.plan.schema import Plan

KEY = "tf_backend"
"""Key of our options in the engine's additional config, which travels to every worker and is part of the compile-cache key."""

OPTIONS: dict[str, type] = {}
"""Options of ours: name -> type."""


def check_engine_options(vllm_config: Any) -> None:
    """Refuse what is not served: quantized checkpoints, LoRA, speculative decoding, pipeline stages.

    Raises:
        OptionRefused: names the option and what to do.
    """
    parallel = vllm_config.parallel_config
    if vllm_config.quant_config is not None:
        method = vllm_config.model_config.quantization
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
    if parallel.pipeline_parallel_size != 1:
        raise OptionRefused(
            f"tf-backend serves one pipeline stage for now, and `--pipeline-parallel-size` is {parallel.pipeline_parallel_size}. "
            "Set it to 1; `--tensor-parallel-size` splits a model over several ranks."
        )
    own = (vllm_config.additional_config or {}).get(KEY, {})
    unknown = sorted(set(own) - set(OPTIONS) - {"plan"}) if isinstance(own, dict) else [str(own)]
    if unknown:
        raise OptionRefused(
            f"`--additional-config` has options under `{KEY}` that tf-backend does not know: {', '.join(unknown)}. "
            f"It knows: {', '.join(OPTIONS) or 'none yet'}."
        )


def publish_plan(vllm_config: Any, plan: Plan) -> None:
    """Make the plan's hash part of the compile-cache key, before anything compiles.

    The cache hashes the files that were traced and the config; it does not see rewritten sources, which the plan's hash covers.
    """
    additional = dict(vllm_config.additional_config or {})
    additional[KEY] = {**additional.get(KEY, {}), "plan": plan.hash}
    vllm_config.additional_config = additional
