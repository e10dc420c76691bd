"""Whether experts can be balanced over ranks (`--enable-eplb`), told before an engine starts.

In: the engine's config, a plan. Out: nothing, or an `OptionRefused` that names the layer or the option, and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_runner import ExpertsSpec

from tf_backend.errors import OptionRefused
from tf_backend.model.balance import expert_specs
from tf_backend.model.stage import absent_modules, lies_in
from tf_backend.plan.schema import Plan

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig

_LEAVE_OUT = "Leave out `--enable-eplb`"


def check_balance(parallel: ParallelConfig, model_config: ModelConfig, plan: Plan) -> None:
    """Refuse what vLLM's balancer cannot do with this model on these ranks.

    Raises:
        OptionRefused: no experts run in vLLM's runner, on all stages or on one; layers differ in what moves; ranks do not divide the
            experts; the engine does not balance any.
    """
    if parallel.enable_elastic_ep:
        raise OptionRefused(
            "tf-backend does not serve ranks that come and go yet: they are given weights by other ways than checkpoints. Leave out "
            "`--enable-elastic-ep`, or use `--model-impl vllm`."
        )
    if not parallel.enable_eplb:
        return
    layers = expert_specs(plan.modules)
    if not layers:
        raise OptionRefused(f"{_why_none(plan)}. {_LEAVE_OUT}.")
    if not model_config.is_moe:
        raise OptionRefused(
            "vLLM makes no groups of ranks for the experts of this model, since it finds no number of experts in its config. "
            f"{_LEAVE_OUT}."
        )
    _check_alike(layers)
    _check_stages(plan, layers)
    experts, redundant = layers[0][1].num_experts, parallel.eplb_config.num_redundant_experts
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size * parallel.prefill_context_parallel_size
    if rest := (experts + redundant) % ranks:
        raise OptionRefused(
            f"{experts} experts and {redundant} redundant ones cannot be dealt out over {ranks} ranks evenly. Set `num_redundant_experts` "
            f"of `--eplb-config` to {redundant + ranks - rest}."
        )


def _why_none(plan: Plan) -> str:
    architecture = plan.provenance.architecture
    written = [experts for experts in plan.experts if experts.runs == "as written"]
    if not written:
        return f"`--enable-eplb` balances experts over ranks, and {architecture} has none"
    return (
        f"`--enable-eplb` balances experts over ranks, and those of {architecture} run as they are written, whole on every rank: in "
        f"`{written[0].experts}`, {written[0].why_written}"
    )


def _check_alike(layers: list[tuple[str, ExpertsSpec]]) -> None:
    """vLLM keeps one table for all layers, and room for the weights of one layer on their way."""
    (first, one), *rest = layers
    if one.rows_of_a_token > 1:
        raise OptionRefused(
            f"vLLM counts the load of experts by tokens, and those of `{first}` take {one.rows_of_a_token} rows of each. {_LEAVE_OUT}."
        )
    for name, spec in rest:
        if spec.num_experts != one.num_experts:
            raise OptionRefused(
                f"vLLM balances layers with one number of experts, and `{first}` has {one.num_experts}, `{name}` {spec.num_experts}. "
                f"{_LEAVE_OUT}."
            )
        if _moved(spec) != _moved(one):
            raise OptionRefused(
                f"vLLM balances layers whose experts are alike, and those of `{name}` have other weights than those of `{first}`. "
                f"{_LEAVE_OUT}."
            )


def _moved(spec: ExpertsSpec) -> tuple[Any, ...]:
    """What the shapes of an expert's weights follow from."""
    return spec.hidden_size, spec.intermediate_size, spec.gate.gated, spec.has_bias, spec.rows_of_a_token


def _check_stages(plan: Plan, layers: list[tuple[str, ExpertsSpec]]) -> None:
    if plan.stages is None:
        return
    for rank in range(len(plan.stages.bounds) - 1):
        absent = absent_modules(plan.stages, plan.layers, rank)
        if all(lies_in(name, absent) for name, _ in layers):
            raise OptionRefused(
                f"the ranks of pipeline stage {rank} hold no experts, and vLLM's balancer runs on every rank. {_LEAVE_OUT}, or set "
                "VLLM_PP_LAYER_PARTITION so that each stage has a layer with experts."
            )
