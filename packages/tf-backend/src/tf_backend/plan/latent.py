"""Latent attention: keys and values that are made of something narrower, which could be cached in their place.

In: the attention that was planned, traces of the modules that call it, the recorded capabilities. Out: for each class of such modules what
its cache takes as it is served, expanded, what it would take compressed, and the fact that prevents it.

What is looked for is read from the graph: value and key are computed by one linear from a compressed value, whose own linear also gives
the features that all heads of the key share (those with the rotary embedding).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

from fx_match import Trace, canonical
from torch import fx, nn
from vllm_layers_bridge.fusions.children import linears_above, only_input
from vllm_layers_bridge.seams.leaf import attention_leaf

from tf_backend.plan.observe import Observation
from tf_backend.plan.schema import AttentionPlan, LatentPlan
from tf_backend.plan.variants import VariantTable


class LatentCapabilities(Protocol):
    """What planning asks of the recorded capabilities."""

    @property
    def name(self) -> str: ...

    @property
    def mla_sizes(self) -> tuple[tuple[int, int], ...]: ...


def plan_latent(
    model: nn.Module,
    seen: Observation,
    table: VariantTable,
    attention: tuple[AttentionPlan, ...],
    capabilities: LatentCapabilities,
) -> tuple[LatentPlan, ...]:
    """One entry for each class and size, in order of first appearance; empty where keys and values are not made of anything narrower.

    The model must be on meta and observed, as it is when its modules are traced.
    """
    return tuple(
        LatentPlan(cls, count, rank, rope, expanded, rank + rope, _why_expanded(rank, rope, capabilities))
        for (cls, rank, rope, expanded), count in Counter(_found(model, seen, table, attention)).items()
    )


def _found(
    model: nn.Module, seen: Observation, table: VariantTable, attention: tuple[AttentionPlan, ...]
) -> Iterator[tuple[str, int, int, int]]:
    for plan in attention:
        module, call = model.get_submodule(plan.module), seen.calls.get(plan.module)
        sizes = latent_sizes(table.trace_of(module, call), module) if call is not None else None
        expanded = 2 * plan.spec.num_kv_heads * plan.spec.cache_head_dim
        if sizes is not None and sum(sizes) < expanded:
            yield (type(module).__name__, *sizes, expanded)


def latent_sizes(trace: Trace, module: nn.Module) -> tuple[int, int] | None:
    """Features that keys and values of all heads are made of, and those that the keys of all heads share beside them; None for others."""
    calls = [node for node in trace.graph.nodes if node.target is attention_leaf]
    if len(calls) != 1 or len(calls[0].args) < 4:
        return None
    _, _, key, value = calls[0].args[:4]
    expands, compresses = _linears(value, trace), frozenset[fx.Node]()
    if len(expands) == 1:
        compresses = _linears(only_input(next(iter(expands))), trace)
    if len(compresses) != 1 or _linears(key, trace) != expands | compresses:
        return None
    rank, whole = _width(module, expands, "in_features"), _width(module, compresses, "out_features")
    return (rank, whole - rank) if 0 < rank < whole else None


def _linears(node: Any, trace: Trace) -> frozenset[fx.Node]:
    """Plain linears nearest above `node`, through what was written into a value as well."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    stack = [node] if isinstance(node, fx.Node) else []
    while stack:
        current = stack.pop()
        if current in seen or canonical(current) in ("shape", "size"):  # no number flows there
            continue
        seen.add(current)
        found.update(linears_above(current, trace))
        stack += [given for writer in trace.written_by(current) for given in writer.all_input_nodes]
        if current.op != "call_module":
            stack += current.all_input_nodes
    return frozenset(found)


def _width(module: nn.Module, linears: frozenset[fx.Node], name: str) -> int:
    (linear,) = linears
    return int(getattr(module.get_submodule(str(linear.target)), name))


def _why_expanded(rank: int, rope: int, capabilities: LatentCapabilities) -> str:
    taken = ", ".join(f"{one} with {other}" for one, other in capabilities.mla_sizes)
    if not taken:
        return f"latent attention of {capabilities.name} is not known to take any sizes"
    if (rank, rope) not in capabilities.mla_sizes:
        return f"latent attention of {capabilities.name} takes {taken} shared features, and this has {rank} with {rope}"
    return f"latent attention of {capabilities.name} takes these sizes; serving through it is not supported yet"
