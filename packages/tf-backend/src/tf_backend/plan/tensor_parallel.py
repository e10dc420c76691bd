"""Tensor parallel for a whole model: each module's placement, checked by running the module on meta at the widths of one rank.

In: module plans for one rank, the traces behind them, the ranks. Out: the same plans with parallel styles, a record per class of what was
split and what is computed whole on each rank and why, and refusals where a module that calls attention cannot be split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from ast_rewrite import CompiledRewrite
from moe_runner import AnyExpertsSpec
from torch import nn
from transformers import PreTrainedModel
from vllm_layers_bridge.errors import BridgeError
from vllm_layers_bridge.layers.heads import heads_per_rank
from vllm_layers_bridge.specs import (
    AttentionSpec,
    LayerSpec,
    LinearSpec,
    MergedLinearSpec,
    QKVLinearSpec,
    RMSNormSpec,
    Style,
)

from tf_backend.plan.local_widths import check_at_local_widths, local_attributes
from tf_backend.plan.modules import consumed_children
from tf_backend.plan.observe import ModuleCall, Observation
from tf_backend.plan.placement import Part, Styles, Unplaced, linear_sizes, place
from tf_backend.plan.places import place_of_class
from tf_backend.plan.schema import LocalAttribute, ModulePlan, ParameterShard, PlacementRecord, Refusal
from tf_backend.plan.shipped_plan import shipped_plan_notes
from tf_backend.plan.variants import VariantTable


class Placed(msgspec.Struct, frozen=True):
    """Module plans with parallel styles, what is said of them, and what cannot be served."""

    modules: tuple[ModulePlan, ...]
    records: tuple[PlacementRecord, ...]
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class _Split:
    """How a module is split, and the numbers that its forward reads on a rank."""

    styles: Styles
    sizes: tuple[LocalAttribute, ...]


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
    by_name = {plan.name: plan for plan in modules}
    replaced: dict[str, ModulePlan] = {}
    records: dict[tuple[str, str], PlacementRecord] = {}
    refusals: dict[str, Refusal] = {}
    known: dict[tuple[Any, ...], _Split | str] = {}
    for plan in modules:
        if plan.variant is None or plan.action == "replace":
            continue
        module = model.get_submodule(plan.name)
        linears = {name: sizes for name, child in module.named_children() if (sizes := linear_sizes(child)) is not None}
        if not linears:
            continue
        specs = attention.get(plan.name, ())
        norms = frozenset(name for name, _ in module.named_children() if _is_norm(by_name.get(f"{plan.name}.{name}")))
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in module.named_parameters())
        merged = {child for layer in plan.layers for child in consumed_children(layer)}
        kept = frozenset(name for name in linears if name not in merged and f"{plan.name}.{name}" not in by_name)
        key = (plan.variant, specs, shapes, norms, kept)
        if key not in known:
            known[key] = _split(module, plan, seen.calls[plan.name], table, rewrites, specs, norms, kept, ranks)
        found = known[key]
        cls = type(module).__name__
        if isinstance(found, _Split):
            _apply(replaced, by_name, plan, found, linears, ranks)
            _count(records, cls, "split", "", _whole_parameters(module, found.styles), _notes(found.styles, ranks))
            continue
        if specs:
            uneven = _uneven(specs, ranks)
            remedy = _whole_heads(attention) if uneven else _ONE_RANK
            refusals.setdefault(cls, _refusal(type(module), plan.name, ranks, uneven or found, remedy))
            continue
        whole = sum(p.numel() for child in linears for p in module.get_submodule(child).parameters())
        _count(records, cls, "replicated", found, whole, ())
        layers = tuple(_replicated(layer) for layer in plan.layers)
        replaced[plan.name] = msgspec.structs.replace(plan, layers=layers)
    for name in attention:
        owner = type(model.get_submodule(name))
        if name not in replaced and owner.__name__ not in refusals:
            refusals[owner.__name__] = _refusal(
                owner, name, ranks, "none of its projections is a linear that can be split", _ONE_RANK
            )
    result = tuple(replaced.get(plan.name, plan) for plan in modules)
    return Placed(result, _with_shipped(model, result, records), tuple(refusals.values()))


def _with_shipped(
    model: PreTrainedModel, modules: tuple[ModulePlan, ...], records: Mapping[tuple[str, str], PlacementRecord]
) -> tuple[PlacementRecord, ...]:
    """The records, with what transformers' own plan says otherwise."""
    notes: dict[str, tuple[str, ...]] = {}
    for owner, found in shipped_plan_notes(model, modules).items():
        cls = type(model.get_submodule(owner)).__name__
        notes[cls] = tuple(dict.fromkeys((*notes.get(cls, ()), *found)))
    return tuple(
        msgspec.structs.replace(record, notes=(*record.notes, *notes.get(record.cls, ())))
        if record.placement == "split"
        else record
        for record in records.values()
    )


def _is_norm(plan: ModulePlan | None) -> bool:
    """Whether a module becomes a norm that can take its mean over ranks."""
    layer = plan.layers[0] if plan is not None and plan.action == "replace" and plan.layers else None
    return isinstance(layer, RMSNormSpec) and layer.scaled_in is not None


def _split(
    module: nn.Module,
    plan: ModulePlan,
    call: ModuleCall,
    table: VariantTable,
    rewrites: Mapping[str, CompiledRewrite],
    specs: tuple[AttentionSpec, ...],
    norms: frozenset[str],
    kept: frozenset[str],
    ranks: int,
) -> _Split | str:
    """How the module is split, or why not."""
    heads = [(spec.num_heads, spec.num_kv_heads) for spec in specs]
    try:
        for pair in heads:
            heads_per_rank(*pair, ranks)
        whole = table.sized_trace_of(module, call)
        styles = place(whole, ranks, heads, _merged_parts(plan, ranks), lambda name: name in norms, kept)
        merged = {child for layer in plan.layers for child in consumed_children(layer)}
        if not merged <= styles.column:
            raise Unplaced("a merged projection would be split in part")
        sizes = local_attributes(module, call, styles, whole, ranks)
        if any(table.is_read_from_outside(size.name) for size in sizes):
            raise Unplaced(f"`{sizes[0].name}`, a size that would be split, is read from outside of it too")
        check_at_local_widths(module, plan, call, styles, rewrites, ranks, sizes, specs)
    except (Unplaced, BridgeError) as problem:
        return str(problem)
    return _Split(styles, sizes)


def _merged_parts(plan: ModulePlan, ranks: int) -> dict[str, tuple[Part, ...]]:
    """Columns of each child that a merged layer takes, in whole or in parts, and into how many pieces each is cut."""
    parts: dict[str, list[Part]] = {}
    for layer in plan.layers:
        if not isinstance(layer, MergedLinearSpec | QKVLinearSpec):
            continue
        for source in layer.sources:
            pieces = ranks
            if isinstance(layer, QKVLinearSpec) and source.shard != "q" and layer.num_kv_heads % ranks:
                pieces = layer.num_kv_heads
            start, stop = source.rows or (0, source.size)
            parts.setdefault(source.child, []).append(Part(start, stop, pieces))
    return {child: tuple(sorted(found, key=lambda part: part.start)) for child, found in parts.items()}


def _apply(
    replaced: dict[str, ModulePlan],
    by_name: Mapping[str, ModulePlan],
    plan: ModulePlan,
    found: _Split,
    linears: Mapping[str, tuple[int, int]],
    ranks: int,
) -> None:
    """The plans of a module that is split and of those of its children that change with it."""
    styles = found.styles
    shards = tuple(ParameterShard(name, shard.axis, shard.pieces) for name, shard in styles.parameters.items())
    replaced[plan.name] = msgspec.structs.replace(plan, sizes=found.sizes, shards=shards)
    for name in linears:
        style: Style = "column" if name in styles.column else "row" if name in styles.row else "replicated"
        pieces = styles.pieces.get(name, ranks)
        _replace_layer(
            replaced,
            by_name.get(f"{plan.name}.{name}"),
            LinearSpec,
            style=style,
            runs=pieces if pieces < ranks else None,
            copies=ranks // pieces,
        )
    for name, pieces in styles.norms.items():
        _replace_layer(replaced, by_name.get(f"{plan.name}.{name}"), RMSNormSpec, pieces=pieces)


def _replace_layer(
    replaced: dict[str, ModulePlan], plan: ModulePlan | None, kind: type[LayerSpec], **changes: object
) -> None:
    layer = plan.layers[0] if plan is not None and plan.layers else None
    if plan is not None and plan.action == "replace" and isinstance(layer, kind):
        layer = msgspec.structs.replace(layer, **changes)
        replaced[plan.name] = msgspec.structs.replace(plan, layers=(layer,))


_ONE_RANK = "Set `--tensor-parallel-size` to 1."


def _refusal(cls: type[nn.Module], name: str, ranks: int, reason: str, remedy: str) -> Refusal:
    said = f"`{cls.__name__}` cannot be split over {ranks} ranks: {reason.rstrip('.')}"
    return Refusal(said, name, place_of_class(cls), remedy)


def _uneven(specs: Sequence[AttentionSpec], ranks: int) -> str:
    """The heads that do not come out even over `ranks`; empty where all do."""
    for spec in specs:
        try:
            heads_per_rank(spec.num_heads, spec.num_kv_heads, ranks)
        except BridgeError:
            return f"it has {spec.num_heads} heads of queries and {spec.num_kv_heads} of keys and values"
    return ""


def _whole_heads(attention: Mapping[str, tuple[AttentionSpec, ...]]) -> str:
    """A remedy that names the numbers of ranks over which all heads of the model come out even."""
    specs = [spec for found in attention.values() for spec in found]
    most = max(spec.num_heads for spec in specs)
    sizes = [str(ranks) for ranks in range(1, most + 1) if not _uneven(specs, ranks)]
    listed = " or ".join(part for part in (", ".join(sizes[:-1]), sizes[-1]) if part)
    return f"Set `--tensor-parallel-size` to {listed}."


def _count(
    records: dict[tuple[str, str], PlacementRecord],
    cls: str,
    placement: Any,
    reason: str,
    whole: int,
    notes: tuple[str, ...],
) -> None:
    old = records.get((cls, reason), PlacementRecord(cls, placement, 0, reason))
    records[cls, reason] = msgspec.structs.replace(
        old,
        count=old.count + 1,
        replicated_parameters=old.replicated_parameters + whole,
        notes=tuple(dict.fromkeys((*old.notes, *notes))),
    )


def _whole_parameters(module: nn.Module, styles: Styles) -> int:
    return sum(p.numel() for name in styles.whole for p in module.get_submodule(name).parameters())


def _notes(styles: Styles, ranks: int) -> tuple[str, ...]:
    notes = []
    few = sorted(name for name, pieces in styles.pieces.items() if pieces < ranks)
    if few:
        notes.append(f"{', '.join(f'`{name}`' for name in few)}: each piece on several ranks")
    if styles.whole:
        names = ", ".join(f"`{name}`" for name in sorted(styles.whole))
        notes.append(f"{names}: whole on every rank")
    if styles.norms:
        names = ", ".join(f"`{name}`" for name in sorted(styles.norms))
        notes.append(f"{names}: mean of squares taken over ranks")
    return tuple(notes)


def _replicated(layer: LayerSpec | AnyExpertsSpec) -> LayerSpec | AnyExpertsSpec:
    return msgspec.structs.replace(layer, style="replicated") if isinstance(layer, MergedLinearSpec) else layer
