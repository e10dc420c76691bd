"""Shared experts of sparse blocks: which the runner calls and adds, and why a block adds the others itself.

In: a model, its observation, the sparse blocks that were found. Out: the fusion that takes them out of the blocks' forwards; and, once
modules are planned and laid over ranks, the experts' specs with their shared experts, whose last linear leaves the sum over ranks to the
runner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec
from fx_match import VIEWS, Trace, canonical
from moe_runner import ExpertsSpec, SharedSite, SharedSpec
from torch import fx, nn
from vllm_layers_bridge.fusions.source import is_path_known
from vllm_layers_bridge.specs import LinearSpec

from tf_backend.plan.experts import FoundExperts
from tf_backend.plan.observe import Observation
from tf_backend.plan.schema import ExpertsPlan, ModulePlan, Variant
from tf_backend.plan.shared_inside import NAME, ExpertsChild, SharedInside
from tf_backend.plan.variants import VariantTable


def shared_inside(model: nn.Module, seen: Observation, found: FoundExperts) -> SharedInside:
    """The fusion for the blocks of `found`."""
    children = {plan.block: _experts_child(plan, found) for plan in found.plans if plan.block in found.beside}
    by_class: dict[type[nn.Module], ExpertsChild] = {}
    for block, child in children.items():
        if child is not None:
            by_class.setdefault(type(model.get_submodule(block)), child)
    holders = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    own = {*(call.module for call in seen.attention), *found.specs, *found.blocks}

    def why_not(block: str, shared: str) -> str:
        child = children.get(block)
        if child is None:
            return _why_not_runner(block, found)
        if child != by_class[type(model.get_submodule(block))]:
            return "its experts are called in another way than those of another block of its class"
        name = f"{block}.{shared}" if block else shared
        call, module = seen.calls.get(name), model.get_submodule(name)
        if any(holders[id(inner)] != 1 for inner in module.modules()) or seen.runs[name] != seen.runs[block]:
            return f"its `{shared}` has several places in the model"
        if call is None or len(call.signatures) > 1 or len(seen.calls[block].signatures) > 1:
            return "it is called in different ways"
        if any(other == name or other.startswith(f"{name}.") for other in own):
            return f"its `{shared}` holds attention, or experts of its own"
        return ""

    return SharedInside(by_class, why_not)


def take_shared(
    model: nn.Module,
    seen: Observation,
    table: VariantTable,
    modules: tuple[ModulePlan, ...],
    found: FoundExperts,
    ranks: int,
) -> tuple[tuple[ModulePlan, ...], tuple[ExpertsPlan, ...]]:
    """`modules` with the shared experts that the fusion took out of their blocks given to the runner, and what is said of each block."""
    variants = {built.variant.id: built.variant for built in table.built}
    by_name = {plan.name: plan for plan in modules}
    plans: list[ExpertsPlan] = []
    for plan in found.plans:
        if plan.block not in found.beside:
            plans.append(plan)
            continue
        entry = by_name.get(plan.block)
        variant = variants[entry.variant] if entry is not None and entry.variant is not None else None
        is_inside = variant is not None and any(fusion.name == NAME for fusion in variant.fusions)
        if is_inside:
            _give(model, seen, table, by_name, plan, ranks)
        why = "" if is_inside else _why_outside(plan.block, found, variant)
        told = msgspec.structs.replace(plan, shared=found.beside[plan.block], why_shared_outside=why)
        plans.append(msgspec.structs.replace(told, shared_runs="inside" if is_inside else "outside"))
    return tuple(by_name[plan.name] for plan in modules), tuple(plans)


def _give(
    model: nn.Module,
    seen: Observation,
    table: VariantTable,
    by_name: dict[str, ModulePlan],
    plan: ExpertsPlan,
    ranks: int,
) -> None:
    """Mark in `by_name` the experts of a block, and the linear that gives what its shared experts give."""
    match = table.match_of(model.get_submodule(plan.block), seen.calls[plan.block], NAME)
    assert match is not None
    site: SharedSite = match["site"]
    child = str(site.shared.target)
    name = f"{plan.block}.{child}" if plan.block else child
    last = _summing(table.trace_of(model.get_submodule(name), seen.calls[name]), name, by_name) if ranks > 1 else None
    if last is not None:
        linear = by_name[last].layers[0]
        by_name[last] = msgspec.structs.replace(by_name[last], layers=(msgspec.structs.replace(linear, reduces=False),))
    gate = "" if site.gate is None else str(site.gate.target)
    shared = SharedSpec(plan.block, child, gate, site.ndim, whole=ranks > 1 and last is None)
    experts = by_name[plan.experts]
    (spec,) = experts.layers
    assert isinstance(spec, ExpertsSpec)
    by_name[plan.experts] = msgspec.structs.replace(experts, layers=(msgspec.structs.replace(spec, shared=shared),))


def _summing(trace: Trace, name: str, by_name: Mapping[str, ModulePlan]) -> str | None:
    """The linear, split on its inputs, that gives what the module `name` gives; None where something is computed of it first."""
    if not is_path_known(trace):
        return None
    user = next(node for node in trace.graph.nodes if node.op == "output")
    node = user.args[0]
    while isinstance(node, fx.Node) and set(node.users) == {user} and canonical(node) in VIEWS:
        user, node = node, node.args[0]
    if not isinstance(node, fx.Node) or node.op != "call_module" or set(node.users) != {user}:
        return None
    called = [other for other in trace.graph.nodes if other.op == "call_module" and other.target == node.target]
    last = f"{name}.{node.target}"
    plan = by_name.get(last)
    layer = plan.layers[0] if plan is not None and plan.action == "replace" and plan.layers else None
    is_row = isinstance(layer, LinearSpec) and layer.style == "row" and not layer.bias
    return last if is_row and len(called) == 1 else None


def _experts_child(plan: ExpertsPlan, found: FoundExperts) -> ExpertsChild | None:
    """The experts of a block, where the runner takes them and is given tokens."""
    spec = found.specs.get(plan.experts)
    if not isinstance(spec, ExpertsSpec) or spec.takes_rows or plan.experts == plan.block:
        return None
    return ExpertsChild(plan.experts.removeprefix(f"{plan.block}.") if plan.block else plan.experts, spec.arguments[0])


def _why_not_runner(block: str, found: FoundExperts) -> str:
    spec = next((found.specs.get(plan.experts) for plan in found.plans if plan.block == block), None)
    if isinstance(spec, ExpertsSpec):
        return "its experts are given the rows of each of them, and not tokens"
    return "its experts run as they are written"


def _why_outside(block: str, found: FoundExperts, variant: Variant | None) -> str:
    plan = next(plan for plan in found.plans if plan.block == block)
    if _experts_child(plan, found) is None:
        return _why_not_runner(block, found)
    misses = variant.misses if variant is not None else ()
    miss = next((miss.reason for miss in misses if miss.fusion == NAME), None)
    return miss or "the fusions that were chosen leave it out"
