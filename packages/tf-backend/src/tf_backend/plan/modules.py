"""From variants to modules: what each module of the model becomes, and where each of its tensors is loaded.

In: a model on meta, its observation, the variant table. Out: module plans in the model's order and weight rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import moe_runner
import msgspec
from fx_match import Trace
from moe_runner import AnyExpertsSpec, ExpertsSpec, ExpertTensor, RouterSpec, WrittenExpertsSpec
from torch import nn
from transformers import PreTrainedModel
from vllm_layers_bridge.fusions.children import is_transposed_linear
from vllm_layers_bridge.fusions.protocol import ModuleFacts, is_plain_linear
from vllm_layers_bridge.specs import (
    AttentionSpec,
    EmbeddingSpec,
    HeadLinearSpec,
    LayerSpec,
    LinearSpec,
    MergedLinearSpec,
    QKVLinearSpec,
)

from tf_backend.plan.angles import AnglesMade
from tf_backend.plan.observe import Observation
from tf_backend.plan.schema import Action, ModulePlan, WeightRule
from tf_backend.plan.sharing import tied_copies
from tf_backend.plan.variants import VariantTable


def plan_modules(
    model: PreTrainedModel,
    base: str,
    head: HeadLinearSpec | None,
    seen: Observation,
    table: VariantTable,
    attention: dict[str, tuple[AttentionSpec, ...]],
    given: Mapping[str, LayerSpec | AnyExpertsSpec] | None = None,
) -> tuple[ModulePlan, ...]:
    """A plan for each module that is traced or replaced; modules that only hold others are left out.

    Args:
        given: by name, layers that take the place of whole modules for reasons found elsewhere.
    """
    plans: list[ModulePlan] = []
    taken: set[str] = set()
    angles = AnglesMade(model, seen)
    asked: set[str] = set()
    for name, module in model.named_modules():
        if name in taken or any(name.startswith(f"{gone}.") for gone in taken):
            continue
        if head is not None and name == head.name:
            plans.append(ModulePlan(name, "replace", layers=(head,)))
            continue
        layer = given[name] if given and name in given else plain_layer(model, name, module)
        if layer is not None and not (given and name in given) and _stays(name, seen, asked):
            continue
        if layer is not None:
            plans.append(ModulePlan(name, "replace", layers=(layer,)))
            if given and name in given:
                taken.add(name)  # with all that lies below it, but for a linear that the layer still calls
            if isinstance(layer, RouterSpec) and layer.child:
                taken.remove(name)
            continue
        if name in {"", base} or not is_traced(module) or name not in seen.calls:
            continue
        call = seen.calls[name]
        facts = ModuleFacts(name, attention.get(name, ()), call.args, call.kwargs, angles.holds_twice)
        outcome = table.outcome(module, call, facts)
        asked.update(f"{name}.{child}" for child in _asked_children(table.trace_of(module, call)))
        built = outcome.built
        replaces = any(fusion.replaces_module for fusion in built.applied)
        action: Action = "replace" if replaces else "rewrite" if built.applied else "keep"
        plans.append(ModulePlan(name, action, built.variant.id, outcome.layers))
        if replaces:
            taken.add(name)
        taken.update(f"{name}.{child}" for layer in outcome.layers for child in consumed_children(layer))
    return tuple(plans)


def _stays(name: str, seen: Observation, asked: set[str]) -> bool:
    """Whether a plain layer is used as none of the engine's can be: others read its weight, which is kept in another form there, or an
    attribute that only torch's has, or it is given its input by keyword."""
    call = seen.calls.get(name)
    return name in seen.borrowed or name in asked or (call is not None and call.has_keywords)


def _asked_children(seen: Trace) -> set[str]:
    """Modules below the traced one of which its forward reads an attribute: the width of a linear, say."""
    owners = (path.rpartition(".") for path in seen.reads)
    return {owner for owner, _, attribute in owners if owner and attribute not in _HELD_BY_ALL}


_HELD_BY_ALL = frozenset({"weight", "bias", "training"})
"""Attributes that a layer of the engine has too."""


def plain_layer(model: PreTrainedModel, name: str, module: nn.Module) -> LayerSpec | None:
    """The layer that a plain torch layer becomes, when no fusion takes it."""
    leaf = name.rpartition(".")[2]
    if is_plain_linear(module) and isinstance(module, nn.Linear):
        return LinearSpec(leaf, module.in_features, module.out_features, module.bias is not None)
    if is_transposed_linear(module):
        in_features, out_features = module.get_parameter("weight").shape
        return LinearSpec(leaf, in_features, out_features, bias=True, transposed=True)
    if type(module) is nn.Embedding and module is model.get_input_embeddings() and module.max_norm is None:
        return EmbeddingSpec(leaf, module.num_embeddings, module.embedding_dim)
    return None


def is_traced(module: nn.Module) -> bool:
    """Whether a module has a forward of the model's own that a fusion could be about."""
    kind = type(module)
    return not kind.__module__.startswith(("torch.nn.", "transformers.activations"))


def consumed_children(layer: LayerSpec | AnyExpertsSpec) -> tuple[str, ...]:
    """Children whose weights a merged layer takes over."""
    if isinstance(layer, MergedLinearSpec | QKVLinearSpec):
        return tuple(dict.fromkeys(source.child for source in layer.sources))
    return ()


def plan_weights(model: PreTrainedModel, plans: tuple[ModulePlan, ...]) -> tuple[WeightRule, ...]:
    """Rules for each parameter and persistent buffer of the model as transformers saves it.

    A tied parameter is stored once, under the first of its names, and loaded into each place that holds it: applying a plan gives
    every place a tensor of its own. A head that the engine ties to the embedding has the embedding's, but for a reload of the weights,
    where each layer is filled anew.
    """
    taken = _places_by_child(plans)
    rules: list[WeightRule] = []
    held = model.state_dict().keys()
    tensors = dict(model.named_parameters())
    tensors.update((name, buffer) for name, buffer in model.named_buffers() if name in held)
    copies = tied_copies(model)
    stacked = _expert_tensors(plans)
    gates = _gate_tensors(plans)
    written = tuple(plan.name for plan in plans if any(isinstance(layer, WrittenExpertsSpec) for layer in plan.layers))
    for name, tensor in tensors.items():
        for place in (name, *copies.get(name, ())):
            if place in stacked:
                target, part = stacked[place]
                rules.append(WeightRule(name, target, None, tuple(tensor.shape), experts=part))
                continue
            if place in gates:
                rules.append(WeightRule(name, gates[place], None, tuple(tensor.shape)))
                continue
            owner, _, leaf = place.rpartition(".")
            kept = next((name for name in written if place.startswith(f"{name}.")), None)
            if kept is not None:
                target = f"{kept}.{moe_runner.WRITTEN}{place.removeprefix(kept)}"
                rules.append(WeightRule(name, target, None, tuple(tensor.shape)))
                continue
            for at in taken.get(owner, (_Place(owner),)):
                target = f"{at.layer}.{leaf}" if at.layer else leaf
                transposed = at.transposed and tensor.ndim == 2
                rule = WeightRule(name, target, at.shard, tuple(tensor.shape), at.rows, transposed)
                rules.append(msgspec.structs.replace(rule, runs=at.runs, copies=at.copies))
    return tuple(rules)


class _Place(NamedTuple):
    """Where the tensors of a child go: the layer, which shard of it, which rows they are, and how often each run of them is loaded."""

    layer: str
    shard: str | int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False
    runs: int = 1
    copies: int = 1


def _places_by_child(plans: tuple[ModulePlan, ...]) -> dict[str, list[_Place]]:
    """For each child whose tensors do not simply keep their name: the places that they go to, parts of a packed child each to its own."""
    places: dict[str, list[_Place]] = {}
    for plan in plans:
        for layer in plan.layers:
            if isinstance(layer, MergedLinearSpec | QKVLinearSpec):
                for source in layer.sources:
                    place = _Place(f"{plan.name}.{layer.name}", source.shard, source.rows, source.transposed)
                    places.setdefault(f"{plan.name}.{source.child}", []).append(place)
            elif isinstance(layer, LinearSpec) and plan.action == "replace" and (layer.transposed or layer.runs):
                runs = layer.runs or 1
                places[plan.name] = [_Place(plan.name, transposed=layer.transposed, runs=runs, copies=layer.copies)]
    return places


def _expert_tensors(plans: tuple[ModulePlan, ...]) -> dict[str, tuple[str, ExpertTensor]]:
    """For each tensor of experts in the runner, by full name: the parameter that it goes to, and what it holds."""
    return {
        f"{plan.name}.{tensor.name}": (f"{plan.name}.{moe_runner.parameter_of(tensor)}", tensor)
        for plan in plans
        for layer in plan.layers
        if isinstance(layer, ExpertsSpec)
        for tensor in layer.tensors
    }


def _gate_tensors(plans: tuple[ModulePlan, ...]) -> dict[str, str]:
    """Tensors of routers that the engine's linear layer for gates holds, by full name: the parameter that each goes to."""
    return {
        f"{plan.name}.{old}": f"{plan.name}.{new}"
        for plan in plans
        for layer in plan.layers
        if isinstance(layer, RouterSpec)
        for old, new in moe_runner.gate_parameters(layer).items()
    }


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Names in a state dict that are copies of another parameter -> the name of that: a checkpoint may hold either, or both."""
    return {name: source for source, names in tied_copies(model).items() for name in names}
