"""All that can be known of a model before its first layer is built: options, plan, capabilities, checkpoint.

In: the engine's config. Out: a plan that will be served, with the model on meta; or the error that says why not. It runs in the
process of the command before the engine starts, and again where the model is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tf_backend import capabilities
from tf_backend.errors import ModelRefused, OptionRefused
from tf_backend.model.balance_check import check_balance
from tf_backend.model.latent import check_expanded, latent_cache
from tf_backend.model.options import check_engine_options
from tf_backend.model.remote_code import TrustedCode
from tf_backend.model.skeleton import skeleton
from tf_backend.plan.planner import Planned, make_plan
from tf_backend.plan.positions import position_refusals
from tf_backend.plan.schema import Parallel, Refusal
from tf_backend.plan.sizes_to_blame import blame_sizes
from tf_backend.weights.checkpoint import check_checkpoint, weight_loader
from tf_backend.weights.load import WeightLoader

_POOLING = Refusal(
    reason="tf-backend does not serve pooling models yet",
    module="",
    place=None,
    remedy="Leave out `--runner pooling`, or use vLLM's own implementation with `--model-impl vllm` where it has one.",
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model on meta and the plan by which it is served."""

    model: PreTrainedModel
    planned: Planned
    parallel: Parallel
    loader: WeightLoader


def _layers_of_stages(layers: int, stages: int) -> tuple[int, ...]:
    """The first layer of each stage, and the number of layers, as vLLM deals them out; VLLM_PP_LAYER_PARTITION says otherwise."""
    from vllm.distributed.utils import get_pp_indices

    try:
        return (*(get_pp_indices(layers, rank, stages)[0] for rank in range(stages)), layers)
    except ValueError as error:
        raise OptionRefused(
            f"VLLM_PP_LAYER_PARTITION does not divide the {layers} layers into {stages} stages: {error}. Name as many numbers of layers as "
            "stages, separated by commas."
        ) from error


def prepare(vllm_config: Any) -> Prepared:
    """Plan the model of `vllm_config` (a `vllm.config.VllmConfig`) and hold engine and checkpoint against the plan.

    Raises:
        OptionRefused: an option of the engine that is not served.
        ConfigError: no such architecture, or its constructor refuses the values.
        ModelRefused: the model cannot be served; holds the reasons.
        CapabilityMismatch: the engine is another than the one that was planned for.
        CheckpointError: a local checkpoint that cannot be loaded.
    """
    check_engine_options(vllm_config)
    model_config = vllm_config.model_config
    if model_config.runner_type == "pooling":  # also where vLLM would make a pooling model of a generating one
        raise ModelRefused([_POOLING], architecture=(model_config.architectures or [""])[0])
    parallel = Parallel(
        tensor=vllm_config.parallel_config.tensor_parallel_size,
        pipeline=vllm_config.parallel_config.pipeline_parallel_size,
        experts=vllm_config.parallel_config.enable_expert_parallel,
        # Where vLLM sees no experts, its data-parallel ranks know nothing of each other.
        data=vllm_config.parallel_config.data_parallel_size if model_config.is_moe else 1,
        redundant=vllm_config.parallel_config.eplb_config.num_redundant_experts,
    )
    model = skeleton(model_config.hf_config, model_config.dtype, _trusted_code(model_config))
    known = capabilities.default()
    latent = latent_cache(vllm_config, known)

    def planned_for(model: PreTrainedModel) -> Planned:
        return make_plan(model, parallel, known, split=_layers_of_stages, latent=latent)

    planned = planned_for(model)
    refusals = (*planned.plan.refusals, *position_refusals(planned.plan, model_config.max_model_len))
    if refusals:
        refusals = blame_sizes(model, refusals, lambda other: planned_for(other).plan.refusals)
        raise ModelRefused(refusals, architecture=planned.plan.provenance.architecture)
    capabilities.check(known)
    check_expanded(vllm_config, planned.plan)
    check_balance(vllm_config.parallel_config, model_config, planned.plan)
    folder = Path(model_config.model)
    if folder.is_dir() and not getattr(model_config, "model_weights", ""):  # else they lie elsewhere than the config
        loader = check_checkpoint(folder, planned, str(vllm_config.load_config.load_format))
    else:
        loader = weight_loader(planned)
    return Prepared(model, planned, parallel, loader)


def _trusted_code(model_config: Any) -> TrustedCode | None:
    if not model_config.trust_remote_code:
        return None
    return TrustedCode(model_config.model, model_config.revision, model_config.code_revision)
