"""Plan a model: observe it, trace and fuse each variant, account for every call of attention, carry the head over, route the weights.

In: a head model on meta, ranks, capabilities of the platform. Out: a `Plan`, and beside it what this process needs to apply it. Pure
analysis: no vLLM, no weights, no GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import moe_runner
import msgspec
import torch
from ast_rewrite import CompiledRewrite
from fx_match import LeafCall, trace
from torch import nn
from transformers import PreTrainedModel
from vllm_layers_bridge.fusions import LatentAttention
from vllm_layers_bridge.fusions.protocol import Fusion
from vllm_layers_bridge.seams.leaf import attention_leaf

from tf_backend.capabilities import Capabilities
from tf_backend.model.buffers import non_persistent_buffers
from tf_backend.plan.attention import holder_refusals, plan_attention, specs_by_module
from tf_backend.plan.conversions import conversion_of
from tf_backend.plan.counted import count_refusals, take_counts
from tf_backend.plan.experts import FoundExperts, find_experts
from tf_backend.plan.fusions import installed_fusions
from tf_backend.plan.head import plan_head
from tf_backend.plan.latent import LatentCache, plan_latent, served_latent
from tf_backend.plan.modules import plan_modules, plan_weights, tied_names
from tf_backend.plan.observe import Observation, observe, observing, observing_mask, takes
from tf_backend.plan.positions import Tabled, stand_in_for_positions, tabled_modules
from tf_backend.plan.provenance import provenance
from tf_backend.plan.refusals import (
    failure_refusals,
    kind_refusals,
    layer_refusals,
    mixing_refusals,
    option_refusals,
)
from tf_backend.plan.schema import HeadPlan, Parallel, Plan, Refusal
from tf_backend.plan.shared_experts import shared_inside, take_shared
from tf_backend.plan.sharing import sharing_refusals
from tf_backend.plan.stages import Split, even_split, plan_stages
from tf_backend.plan.tensor_parallel import Placed, place_modules
from tf_backend.plan.variants import VariantTable
from tf_backend.weights.conversion import Conversion


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what belongs to this process alone: compiled forwards by variant id."""

    plan: Plan
    rewrites: dict[str, CompiledRewrite]
    tied: dict[str, str]
    """Other names of a tensor that has several -> the name by which the plan's weight rules know it."""
    ignorable_patterns: tuple[str, ...]
    conversion: Conversion
    """How transformers reads checkpoints of the model."""
    tabled: Mapping[str, Tabled] = field(default_factory=dict)
    """By name, the modules that tables are built from."""
    integers: frozenset[str] = frozenset()
    """Names of tensors that hold no floats, as the plan's weight rules know them."""


def make_plan(
    model: PreTrainedModel,
    parallel: Parallel,
    capabilities: Capabilities,
    fusions: Sequence[Fusion] | None = None,
    split: Split = even_split,
    latent: LatentCache | None = None,
) -> Planned:
    """Plan `model`, which is on meta and in evaluation mode.

    Args:
        parallel: ranks to plan for.
        capabilities: what the platform's layers take; recorded or shipped, see `tf_backend.capabilities`.
        fusions: in order of priority; those installed when None.
        split: which layers each pipeline stage has.
        latent: what the engine's latent attention takes; what the capabilities say when None.
    """
    refusals = list(kind_refusals(model))
    if refusals:
        return _refused(model, parallel, capabilities, refusals)
    with moe_runner.experts_passed_by(model):
        cache = latent or LatentCache.of(capabilities, model.config.get_text_config().model_type)
        chosen = (*installed_fusions(), LatentAttention(cache.taken)) if fusions is None else fusions
        return _plan(model, parallel, capabilities, chosen, split, cache, is_shared_inside=fusions is None)


def _plan(
    model: PreTrainedModel,
    parallel: Parallel,
    capabilities: Capabilities,
    fusions: Sequence[Fusion],
    split: Split,
    cache: LatentCache,
    *,
    is_shared_inside: bool,
) -> Planned:
    seen = observe(model)
    while stand_in_for_positions(model, seen) is not None:
        seen = observe(model)
    if seen.failure is not None:
        failing = seen.failure.module
        if not takes(model.get_submodule(failing), seen.calls[failing]):  # nothing could be traced with such a call
            return _refused(model, parallel, capabilities, list(failure_refusals(model, seen)))
    tabled = tabled_modules(model)
    experts = find_experts(model, seen, capabilities, parallel)
    layers = _layers_name(model, seen)
    attention, attention_refusals = plan_attention(model, seen, capabilities)
    base, head = _base_name(model), None
    if is_shared_inside and experts.beside:
        fusions = (*fusions, shared_inside(model, seen, experts))
    table = VariantTable(fusions)
    with observing(model, attention_leaf, observing_mask), torch.no_grad():
        counts = take_counts(model, seen, table)
        refusals = _run_refusals(model, layers, seen, experts, attention_refusals)
        refusals += option_refusals(model)
        if not refusals:  # a model that is refused already need not have a head that can be followed
            base, head = _plan_head(model, base, seen, refusals)
        specs = specs_by_module(attention)
        layers_of_their_own = {name: module.spec for name, module in tabled.items()} | experts.specs
        modules = plan_modules(model, base, head.linear if head else None, seen, table, specs, layers_of_their_own)
        if not refusals:
            variants = tuple(built.variant for built in table.built)
            refusals += holder_refusals(model, attention, modules, variants)
            refusals += count_refusals(model, seen, counts, modules, variants)
        attention = served_latent(model, seen, table, attention, modules)
        latent = plan_latent(model, seen, table, attention, modules, cache)
        placed = Placed(modules, (), ())
        if parallel.tensor > 1 and not refusals:
            placed = place_modules(model, modules, seen, table, specs, parallel.tensor)
            refusals += placed.refusals
        with_shared, experts_plans = take_shared(model, seen, table, placed.modules, experts, parallel.tensor)
        placed = msgspec.structs.replace(placed, modules=with_shared)
    stages = None
    if parallel.pipeline > 1 and not refusals and head is not None:
        found = plan_stages(model, base, layers, head, parallel.pipeline, split)
        if isinstance(found, Refusal):
            refusals.append(found)
        else:
            stages = found
    plan = Plan(
        provenance=provenance(model, parallel, capabilities),
        base=base,
        layers=layers,
        variants=tuple(built.variant for built in table.built),
        modules=placed.modules,
        attention=attention,
        head=head,
        weights=plan_weights(model, placed.modules),
        buffers=non_persistent_buffers(model),
        refusals=tuple(refusals),
        placement=placed.records,
        experts=experts_plans,
        stages=stages,
        latent=latent,
        position_rows=seen.position_rows,
    )
    return Planned(
        plan,
        {built.variant.id: built.rewrite for built in table.built if built.rewrite is not None},
        tied_names(model),
        (*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *_obsolete_buffers(plan)),
        conversion_of(model, base),
        tabled,
        frozenset(name for name, tensor in _tensors(model) if not tensor.is_floating_point()),
    )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _obsolete_buffers(plan: Plan) -> tuple[str, ...]:
    """Patterns of buffers that old checkpoints hold in every layer and that the model now computes once."""
    return tuple(sorted({rf"(^|\.){re.escape(leaf)}$" for leaf in map(_rotary_leaf, plan.buffers) if leaf}))


def _rotary_leaf(name: str) -> str:
    """``rotary_emb.inv_freq`` of a full name that ends so."""
    owner, leaf = name.split(".")[-2:] if "." in name else ("", name)
    return f"{owner}.{leaf}" if leaf == "inv_freq" else ""


def _refused(
    model: PreTrainedModel, parallel: Parallel, capabilities: Capabilities, refusals: list[Refusal]
) -> Planned:
    """The plan of a model of another kind: it holds the reason and nothing else."""
    plan = Plan(
        provenance=provenance(model, parallel, capabilities),
        base=_base_name(model),
        layers="",
        variants=(),
        modules=(),
        attention=(),
        head=None,
        weights=(),
        buffers=(),
        refusals=tuple(refusals),
    )
    return Planned(plan, {}, {}, (), Conversion({}))


def _run_refusals(
    model: PreTrainedModel,
    layers: str,
    seen: Observation,
    experts: FoundExperts,
    attention: tuple[Refusal, ...],
) -> list[Refusal]:
    """What the run showed; that it ended early, or that layers lack attention, is told only where nothing explains it."""
    refused = tuple(name for name in experts.blocks if type(model.get_submodule(name)) in experts.refusals)
    seen.mixing = [mixing for mixing in seen.mixing if mixing.module not in experts.tokenwise]
    found = [*experts.refusals.values(), *mixing_refusals(model, seen, refused), *attention]
    found = found or list(failure_refusals(model, seen)) or list(layer_refusals(model, layers, seen))
    return [*found, *sharing_refusals(model)]


def _plan_head(
    model: PreTrainedModel, base: str, seen: Observation, refusals: list[Refusal]
) -> tuple[str, HeadPlan | None]:
    """The decoder's name and the head; a refusal is added where it cannot be carried over."""
    call = seen.calls[""]
    traced = trace(model, call.args, call.kwargs, leaves=[LeafCall(attention_leaf)])
    found = plan_head(model, traced, {attention.module for attention in seen.attention})
    if isinstance(found, Refusal):
        refusals.append(found)
        return base, None
    return found


def _base_name(model: PreTrainedModel) -> str:
    base = model.base_model
    return next((name for name, module in model.named_modules() if module is base), "")


def _layers_name(model: nn.Module, seen: Observation) -> str:
    """The longest list of modules whose entries call the attention interface; empty when there is none."""
    calling = [call.module for call in seen.attention]
    best, length = "", 0
    for name, module in model.named_modules():
        holds = any(owner.startswith(f"{name}.") for owner in calling)
        if isinstance(module, nn.ModuleList) and holds and len(module) > length:
            best, length = name, len(module)
    return best
