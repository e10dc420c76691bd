"""Latent attention: keys and values that are made of something narrower, which is cached in their place where the engine takes it.

In: the attention that was planned, traces of the modules that call it, what the engine's latent attention takes. Out: which attention is
latent as it is served, and for each class of such modules what its cache takes expanded and compressed, with the fact that prevents the
latter.

What is looked for is read from the graph: value and key are computed by one linear from a compressed value, whose own linear also gives
the features that all heads of the key share (those with the rotary embedding).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from torch import nn
from vllm_layers_bridge.fusions import LatentAttention
from vllm_layers_bridge.fusions.latent_attention import latent_sizes

from tf_backend.capabilities import Capabilities
from tf_backend.plan.observe import Observation
from tf_backend.plan.schema import AttentionPlan, LatentPlan, ModulePlan, Variant
from tf_backend.plan.variants import VariantTable

NOT_OF_TYPE = "vLLM caches latents for certain types of models, and this type is none of those"


@dataclass(frozen=True, slots=True)
class LatentCache:
    """What the engine's latent attention takes: pairs (features of the latent, shared features); and why it takes none after all, or ""."""

    sizes: tuple[tuple[int, int], ...]
    why_not: str = ""

    @classmethod
    def of(cls, capabilities: Capabilities, model_type: str) -> LatentCache:
        """As the capabilities have it for models of a type, whatever the options of an engine."""
        if capabilities.mla_sizes and model_type not in capabilities.mla_types:
            return cls(capabilities.mla_sizes, NOT_OF_TYPE)
        unknown = f"latent attention of {capabilities.name} is not known to take any sizes"
        return cls(capabilities.mla_sizes, "" if capabilities.mla_sizes else unknown)

    @property
    def taken(self) -> tuple[tuple[int, int], ...]:
        """The pairs that are served latent."""
        return () if self.why_not else self.sizes

    def why_expanded(self, rank: int, rope: int) -> str:
        """Why the engine does not take these sizes; empty where it does."""
        if (rank, rope) in self.sizes or not self.sizes:
            return self.why_not
        taken = ", ".join(f"{one} with {other}" for one, other in self.sizes)
        return f"the engine's latent attention takes {taken} shared features, and this has {rank} with {rope}"


def served_latent(
    model: nn.Module,
    seen: Observation,
    table: VariantTable,
    attention: tuple[AttentionPlan, ...],
    modules: tuple[ModulePlan, ...],
) -> tuple[AttentionPlan, ...]:
    """The attention with what is served latent marked so: where `LatentAttention` rewrote the forward that calls it."""
    latent = set(_rewritten(modules, tuple(built.variant for built in table.built)))
    marked = []
    for plan in attention:
        if plan.module in latent:
            spec = latent_sizes(
                table.trace_of(model.get_submodule(plan.module), seen.calls[plan.module]),
                model.get_submodule(plan.module),
            )
            plan = msgspec.structs.replace(plan, latent=spec)
        marked.append(plan)
    return tuple(marked)


def plan_latent(
    model: nn.Module,
    seen: Observation,
    table: VariantTable,
    attention: tuple[AttentionPlan, ...],
    modules: tuple[ModulePlan, ...],
    cache: LatentCache,
) -> tuple[LatentPlan, ...]:
    """One entry for each class and size, in order of first appearance; empty where keys and values are not made of anything narrower.

    The model must be on meta and observed, as it is when its modules are traced.
    """
    found: Counter[tuple[str, int, int, int, str]] = Counter()
    by_id = {built.variant.id: built.variant for built in table.built}
    variants = {plan.name: by_id[plan.variant] for plan in modules if plan.variant is not None}
    for plan in attention:
        module, call = model.get_submodule(plan.module), seen.calls.get(plan.module)
        spec = latent_sizes(table.trace_of(module, call), module) if call is not None else None
        expanded = 2 * plan.spec.num_kv_heads * plan.spec.cache_head_dim
        if spec is None or spec.rank + spec.rope >= expanded:
            continue
        reason = ""
        if plan.latent is None:
            reason = cache.why_expanded(spec.rank, spec.rope) or _missed(variants.get(plan.module))
        found[type(module).__name__, spec.rank, spec.rope, expanded, reason] += 1
    return tuple(
        LatentPlan(cls, count, rank, rope, expanded, rank + rope, reason)
        for (cls, rank, rope, expanded, reason), count in found.items()
    )


def _rewritten(modules: tuple[ModulePlan, ...], variants: tuple[Variant, ...]) -> Iterator[str]:
    latent = {v.id for v in variants if any(fusion.name == LatentAttention.name for fusion in v.fusions)}
    return (plan.name for plan in modules if plan.variant in latent)


def _missed(variant: Variant | None) -> str:
    misses = variant.misses if variant is not None else ()
    miss = next((miss.reason for miss in misses if miss.fusion == LatentAttention.name), None)
    return miss or "the fusions that were chosen leave it out"
