"""Tensor parallel for a whole model: each module's placement, checked by running the module on meta at the widths of one rank.

In: module plans for one rank, the traces behind them, the ranks. Out: the same plans with parallel styles, a record per class of what was
split and what is computed whole on each rank and why, and refusals where a module that calls attention cannot be split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from ast_rewrite import CompiledRewrite
from torch import nn
from transformers import PreTrainedModel
from vllm_layers_bridge.errors import BridgeError
from vllm_layers_bridge.layers.heads import heads_per_rank
from vllm_layers_bridge.layers.linear import qkv_split_sizes
from vllm_layers_bridge.seams.leaf import holder_name
from vllm_layers_bridge.specs import (
    ActivationAndMulSpec,
    AttentionSpec,
    LayerSpec,
    LinearSpec,
    MergedLinearSpec,
    QKVLinearSpec,
    Style,
)

from tf_backend.generated import derive
from tf_backend.plan.modules import consumed_children
from tf_backend.plan.observe import ModuleCall, Observation
from tf_backend.plan.placement import Styles, Unplaced, linear_sizes, place
from tf_backend.plan.places import place_of_class
from tf_backend.plan.schema import ModulePlan, PlacementRecord, Refusal
from tf_backend.plan.variants import VariantTable


class Placed(msgspec.Struct, frozen=True):
    """Module plans with parallel styles, what is said of them, and what cannot be served."""

    modules: tuple[ModulePlan, ...]
    records: tuple[PlacementRecord, ...]
    refusals: tuple[Refusal, ...]


def place_modules(
    model: PreTrainedModel,
    modules: tuple[ModulePlan, ...],
    seen: Observation,
    table: VariantTable,
    attention: Mapping[str, tuple[AttentionSpec, ...]],
    ranks: int,
) -> Placed:
    """Lay every module of `modules` over `ranks`. Call where the attention leaf is registered: modules are run on meta."""
    rewrites = {built.variant.id: built.rewrite for built in table.built if built.rewrite is not None}
    styled: dict[str, Style] = {}
    replaced: dict[str, ModulePlan] = {}
    records: dict[tuple[str, str], PlacementRecord] = {}
    refusals: dict[str, Refusal] = {}
    known: dict[tuple[Any, ...], Styles | str] = {}
    for plan in modules:
        if plan.variant is None or plan.action == "replace":
            continue
        module = model.get_submodule(plan.name)
        linears = {name: sizes for name, child in module.named_children() if (sizes := linear_sizes(child)) is not None}
        if not linears:
            continue
        specs = attention.get(plan.name, ())
        key = (
            plan.variant,
            specs,
            tuple(linears.items()),
        )
        if key not in known:
            known[key] = _styles(module, plan, seen.calls[plan.name], table, rewrites, specs, ranks)
        found = known[key]
        cls = type(module).__name__
        if isinstance(found, Styles):
            _count(records, cls, "", 0)
            replaced[plan.name] = plan
            for name in linears:
                style: Style = "column" if name in found.column else "row" if name in found.row else "replicated"
                styled[f"{plan.name}.{name}"] = style
            continue
        if specs:
            refusals.setdefault(cls, _refusal(type(module), plan.name, ranks, found))
            continue
        whole = sum(p.numel() for child in linears for p in module.get_submodule(child).parameters())
        _count(records, cls, found, whole)
        layers = tuple(_replicated(layer) for layer in plan.layers)
        replaced[plan.name] = ModulePlan(plan.name, plan.action, plan.variant, layers)
    for name in attention:
        owner = type(model.get_submodule(name))
        if name not in replaced and owner.__name__ not in refusals:
            refusals[owner.__name__] = _refusal(
                owner, name, ranks, "none of its projections is a linear that can be split"
            )
    result: list[ModulePlan] = []
    for plan in modules:
        layer = plan.layers[0] if plan.layers else None
        if plan.name in styled and plan.action == "replace" and isinstance(layer, LinearSpec):
            layer = msgspec.structs.replace(layer, style=styled[plan.name])
            result.append(ModulePlan(plan.name, plan.action, plan.variant, (layer,)))
        else:
            result.append(replaced.get(plan.name, plan))
    return Placed(tuple(result), tuple(records.values()), tuple(refusals.values()))


def _refusal(cls: type[nn.Module], name: str, ranks: int, reason: str) -> Refusal:
    return Refusal(
        f"`{cls.__name__}` cannot be split over {ranks} ranks: {reason}",
        name,
        place_of_class(cls),
        "Set `--tensor-parallel-size` to 1, or to another number where this one does not divide its heads.",
    )


def _count(records: dict[tuple[str, str], PlacementRecord], cls: str, reason: str, whole: int) -> None:
    old = records.get((cls, reason), PlacementRecord(cls, "replicated" if reason else "split", 0, reason, 0))
    records[cls, reason] = PlacementRecord(cls, old.placement, old.count + 1, reason, old.replicated_parameters + whole)


def _replicated(layer: LayerSpec) -> LayerSpec:
    return msgspec.structs.replace(layer, style="replicated") if isinstance(layer, MergedLinearSpec) else layer


def _styles(
    module: nn.Module,
    plan: ModulePlan,
    call: ModuleCall,
    table: VariantTable,
    rewrites: Mapping[str, CompiledRewrite],
    specs: tuple[AttentionSpec, ...],
    ranks: int,
) -> Styles | str:
    """How the module is split, or why not."""
    kinds = {(spec.num_heads, spec.num_kv_heads) for spec in specs}
    heads = next(iter(kinds)) if len(kinds) == 1 else None
    try:
        if len(kinds) > 1:
            raise Unplaced(f"its {len(specs)} calls of attention have different numbers of heads")
        if heads is not None:
            heads_per_rank(*heads, ranks)
        styles = place(table.trace_of(module, call), ranks, heads, _packed(plan))
        merged = {child for layer in plan.layers for child in consumed_children(layer)}
        if not merged <= styles.column:
            raise Unplaced("a merged projection would be split in part")
        _check_at_local_widths(module, plan, call, styles, rewrites, ranks, len(specs))
    except (Unplaced, BridgeError) as problem:
        return str(problem)
    return styles


def _packed(plan: ModulePlan) -> dict[str, tuple[tuple[int, int], ...]]:
    """Columns of the parts of each child that a merged layer takes in parts, in the order of the child."""
    parts: dict[str, list[tuple[int, int]]] = {}
    for layer in plan.layers:
        if isinstance(layer, MergedLinearSpec | QKVLinearSpec):
            for source in layer.sources:
                if source.rows is not None:
                    parts.setdefault(source.child, []).append(source.rows)
    return {child: tuple(sorted(rows)) for child, rows in parts.items()}


def _check_at_local_widths(
    module: nn.Module,
    plan: ModulePlan,
    call: ModuleCall,
    styles: Styles,
    rewrites: Mapping[str, CompiledRewrite],
    ranks: int,
    calls: int,
) -> None:
    """Run the forward that will run, with the widths of one rank; Unplaced if it fails or returns other shapes."""
    local = _local_copy(module, plan, styles, rewrites, ranks, calls)
    try:
        expected, found = module(*call.args, **call.kwargs), local(*call.args, **call.kwargs)
    except Exception as error:  # whatever the model's own code raises, it does not run at these widths
        first = str(error).split("\n", 1)[0]
        raise Unplaced(
            f"its forward does not run at the widths of one rank: {type(error).__name__}: {first}"
        ) from error
    if _shapes(expected) != _shapes(found):
        raise Unplaced("it returns other shapes at the widths of one rank")


def _local_copy(
    module: nn.Module,
    plan: ModulePlan,
    styles: Styles,
    rewrites: Mapping[str, CompiledRewrite],
    ranks: int,
    calls: int,
) -> nn.Module:
    kind = type(module)
    if plan.variant is not None and plan.variant in rewrites:
        kind = derive(kind, rewrites[plan.variant])
    local: nn.Module = kind.__new__(kind)
    local.__dict__.update(module.__dict__)
    local.__dict__["_modules"] = dict(module._modules)
    if calls > 1:
        local._modules.update({holder_name(at): nn.Module() for at in range(calls)})
    for name, child in module.named_children():
        sizes = linear_sizes(child)
        if name in styles.column and sizes is not None:
            local._modules[name] = _meta_linear(sizes[0], sizes[1] // ranks, child)
        elif name in styles.row and sizes is not None:
            local._modules[name] = _meta_linear(sizes[0] // ranks, sizes[1], child)
    for layer in plan.layers:
        like = next((module.get_submodule(child) for child in consumed_children(layer)), None)
        for taken in consumed_children(layer):
            local._modules.pop(taken, None)
        if isinstance(layer, QKVLinearSpec):
            widths = qkv_split_sizes(layer, ranks)
            local.__dict__[layer.sizes_attribute] = widths
            local._modules[layer.name] = _meta_linear(layer.in_features, sum(widths), like)
        elif isinstance(layer, MergedLinearSpec):
            if any(source.size % ranks for source in layer.sources):
                raise Unplaced(f"{ranks} ranks do not divide the parts of `{layer.name}`")
            total = sum(source.size for source in layer.sources) // ranks
            local._modules[layer.name] = _meta_linear(layer.in_features, total, like)
        elif isinstance(layer, ActivationAndMulSpec):
            local._modules[layer.name] = _HalfProduct()
    return local


class _HalfProduct(nn.Module):
    """Stands for a fused activation: gives half the width that it takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return first * second


def _meta_linear(in_features: int, out_features: int, like: nn.Module | None) -> nn.Linear:
    weight = getattr(like, "weight", None)
    dtype = weight.dtype if isinstance(weight, torch.Tensor) else None
    return nn.Linear(in_features, out_features, getattr(like, "bias", None) is not None, device="meta", dtype=dtype)


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, tuple | list):
        return [_shapes(item) for item in value]
    if isinstance(value, dict):
        return {key: _shapes(item) for key, item in value.items()}
    return type(value).__name__
