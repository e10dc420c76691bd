"""Variants: instances of one class that run the same code, traced once and fused once.

In: a model on meta, what each module was called with, the fusions in order. Out: for each module its `Variant`, the compiled rewrite where
its forward changes, and the layers it gets. Two instances share a variant if they have the same class and children, were called
alike, and agree on every attribute that the traced forward read.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from ast_rewrite import CompiledRewrite, FunctionSource, Patch, RewriteError
from fx_match import MISSING, LeafCall, Match, Miss, Trace, trace
from torch import nn
from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions import AttentionCalls, LatentAttention, Rotary
from vllm_layers_bridge.fusions.protocol import Fusion, ModuleFacts
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import LayerSpec

from tf_backend.plan.observe import ModuleCall
from tf_backend.plan.on_meta import require_runs
from tf_backend.plan.places import class_path, place_of_class, place_of_line
from tf_backend.plan.schema import FusionRecord, GuardRecord, MissRecord, Place, TraceRecord, Variant
from tf_backend.plan.shared_inside import NAME as SHARED_INSIDE


@dataclass(slots=True)
class Traced:
    """One trace and what each fusion found in it."""

    trace: Trace
    signature: tuple[Any, ...]
    matches: dict[str, Match] = field(default_factory=dict)
    misses: dict[str, MissRecord] = field(default_factory=dict)
    built: dict[frozenset[str], Built] = field(default_factory=dict)


@dataclass(slots=True)
class Built:
    """A variant with its compiled forward, for one choice of fusions."""

    variant: Variant
    applied: tuple[Fusion, ...]
    rewrite: CompiledRewrite | None
    known_to_run: set[tuple[LayerSpec, ...]] = field(default_factory=set)
    """Layers with which the rewritten forward was seen to run."""


@dataclass(slots=True)
class Outcome:
    """What one instance becomes."""

    built: Built
    layers: tuple[LayerSpec, ...]


_BESIDE_OTHERS = frozenset({Rotary.name, AttentionCalls.name, LatentAttention.name, SHARED_INSIDE})
"""Fusions whose part of a forward no other fusion takes: a miss is told beside the matches of others, and theirs beside a match here."""


class VariantTable:
    """Traces each variant once and answers for each instance."""

    def __init__(self, fusions: Sequence[Fusion]) -> None:
        self.fusions = tuple(fusions)
        self._traced: dict[type[nn.Module], list[Traced]] = {}
        self._order: list[Built] = []

    @property
    def built(self) -> tuple[Built, ...]:
        """Every variant in use, in order of first appearance."""
        return tuple(self._order)

    def outcome(self, module: nn.Module, call: ModuleCall, facts: ModuleFacts) -> Outcome:
        """What `module` becomes, given what it was called with."""
        traced = self._find(module, call)
        excluded: dict[str, str] = {}
        while True:
            built = self._build(traced, frozenset(excluded), excluded)
            try:
                layers: list[LayerSpec] = []
                for fusion in built.applied:
                    current = fusion
                    match = traced.matches[fusion.name]
                    fusion.check(match, module, facts)
                    layers.extend(fusion.layers(match, module, facts))
                if built.rewrite is not None and tuple(layers) not in built.known_to_run:
                    current = built.applied[0]
                    asks = any(guard.kind == "size" for guard in traced.trace.guards)
                    require_runs(module, layers, built.rewrite, call, facts.attention, asks_for_sizes=asks)
                    built.known_to_run.add(tuple(layers))
                if all(built.variant.id != known.variant.id for known in self._order):
                    self._order.append(built)
                return Outcome(built, tuple(layers))
            except NotFusable as problem:
                excluded[current.name] = str(problem)

    def trace_of(self, module: nn.Module, call: ModuleCall) -> Trace:
        """The trace that stands for `module`."""
        return self._find(module, call).trace

    def sized_trace_of(self, module: nn.Module, call: ModuleCall) -> Trace:
        """A trace of `module` whose shapes are its own: the one that stands for it may be of an instance of other sizes."""
        stands = self._find(module, call).trace
        return stands if _shapes(stands.module) == _shapes(module) else _trace(module, call)

    def match_of(self, module: nn.Module, call: ModuleCall, fusion: str) -> Match | None:
        """What the fusion of that name found in the trace that stands for `module`, applied or not."""
        return self._find(module, call).matches.get(fusion)

    def is_read_from_outside(self, attribute: str) -> bool:
        """Whether a forward that was traced reads an attribute of that name from a module below it."""
        traces = (traced.trace for found in self._traced.values() for traced in found)
        return any(path.endswith(f".{attribute}") for seen in traces for path in seen.reads)

    def _find(self, module: nn.Module, call: ModuleCall) -> Traced:
        signature = (tuple(module._modules), _shared(module), call.signature, len(call.signatures) > 1)
        known = self._traced.setdefault(type(module), [])
        for traced in known:
            if traced.signature == signature and agrees(module, traced.trace):
                return traced
        new = Traced(_trace(module, call), signature)
        for fusion in self.fusions:
            found = fusion.match(new.trace)
            doubt = _doubt(fusion, new.trace, call) if isinstance(found, Match) else None
            if doubt is not None:
                new.misses[fusion.name] = doubt
            elif isinstance(found, Match):
                new.matches[fusion.name] = found
            elif fusion.is_candidate(new.trace):
                new.misses[fusion.name] = miss_record(fusion.name, found, new.trace)
        known.append(new)
        return new

    def _build(self, traced: Traced, excluded: frozenset[str], reasons: dict[str, str]) -> Built:
        if excluded not in traced.built:
            traced.built[excluded] = _build_variant(traced, self.fusions, reasons)
        return traced.built[excluded]


def _trace(module: nn.Module, call: ModuleCall) -> Trace:
    seen = trace(module, call.args, call.kwargs, leaves=[LeafCall(attention_leaf)])
    if len(call.signatures) > 1:  # what one call was given says nothing of the others
        seen = dataclasses.replace(seen, given={})
    return seen


def _shapes(module: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, parameter.shape) for name, parameter in module.named_parameters()]


def _shared(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Other names of modules below `module` that have several, with the first of each: what a trace says of one it says of that."""
    first = {id(child): name for name, child in module.named_modules()}
    every = module.named_modules(remove_duplicate=False)
    return tuple((name, first[id(child)]) for name, child in every if first[id(child)] != name)


def _build_variant(traced: Traced, fusions: Sequence[Fusion], excluded: dict[str, str]) -> Built:
    cls = traced.trace.module_class
    place = place_of_class(cls)
    taken = traced.matches.keys() - _BESIDE_OTHERS
    misses = [record for record in traced.misses.values() if not taken or record.fusion in _BESIDE_OTHERS]
    misses += [MissRecord(name, reason, place) for name, reason in excluded.items()]
    chosen = [fusion for fusion in fusions if fusion.name in traced.matches and fusion.name not in excluded]
    whole = next((fusion for fusion in chosen if fusion.replaces_module), None)
    patch: Patch | None = None
    applied: list[Fusion] = []
    records: list[FusionRecord] = []
    if whole is not None:
        applied, records = [whole], [FusionRecord(whole.name, _lines(traced, whole), True)]
    else:
        for fusion in chosen:
            try:
                patch = _patched(traced, [*applied, fusion])
            except (RewriteError, LookupError) as problem:
                misses.append(MissRecord(fusion.name, f"its source cannot be rewritten: {problem}", place))
                continue
            applied.append(fusion)
            records.append(FusionRecord(fusion.name, _lines(traced, fusion)))
    rewrite: CompiledRewrite | None = None
    if applied and patch is not None:
        try:
            rewrite = patch.compile()
        except RewriteError as problem:
            misses += [
                MissRecord(fusion.name, f"its source cannot be rewritten: {problem}", place) for fusion in applied
            ]
            applied, records, patch = [], [], None
    variant = Variant(
        id="",
        cls=class_path(cls),
        place=place,
        guards=tuple(_guards(traced.trace)),
        trace=TraceRecord(len(traced.trace.graph.nodes), traced.trace.complete, _stop(traced.trace)),
        fusions=tuple(records),
        misses=tuple(misses),
        source_sha256=rewrite.source_sha256 if rewrite else _source_hash(cls),
        rewritten=rewrite.text if rewrite else None,
        rewritten_sha256=rewrite.sha256 if rewrite else None,
        diff=_diff(patch, place) if rewrite and patch else None,
    )
    return Built(_with_id(variant, _without_types(traced.signature)), tuple(applied), rewrite)


def _patched(traced: Traced, fusions: Sequence[Fusion]) -> Patch:
    """A fresh patch with the edits of `fusions` in order, so that one that is refused half-way leaves nothing behind."""
    patch = Patch(FunctionSource.of(traced.trace.module_class.forward))
    for fusion in fusions:
        fusion.rewrite(traced.matches[fusion.name], traced.trace, patch)
    return patch


def _doubt(fusion: Fusion, seen: Trace, call: ModuleCall) -> MissRecord | None:
    """Why a match on this one path says too little to put a layer in the place of the whole module; edits of the text keep all paths."""
    if not fusion.replaces_module:
        return None
    branch = next((guard for guard in seen.guards if guard.kind != "attribute" and guard.outcome is not None), None)
    if branch is not None:
        place = place_of_class(seen.module_class)
        if branch.span is not None:
            place = place_of_line(seen.module_class.__module__, seen.code.co_filename, branch.span.lineno)
        return MissRecord(
            fusion.name, f"its forward takes another path unless `{branch.expr}` is {branch.outcome}", place
        )
    if len(call.signatures) > 1:
        return MissRecord(fusion.name, "it is called in different ways", place_of_class(seen.module_class))
    return None


def _diff(patch: Patch, place: Place | None) -> str:
    """The patch's diff, headed by the Python module and not by where it is installed: a plan is the same on every machine."""
    _, _, rest = patch.diff().partition("\n")
    return f"--- {place.module}:{place.line}\n{rest}" if place is not None and rest else rest


def _source_hash(cls: type[nn.Module]) -> str | None:
    """Hash of the source of the forward; None where there is no source."""
    try:
        return FunctionSource.of(cls.forward).sha256
    except RewriteError:
        return None


def _with_id(variant: Variant, signature: tuple[Any, ...]) -> Variant:
    import msgspec

    digest = hashlib.sha256(msgspec.json.encode(variant) + repr(signature).encode()).hexdigest()[:12]
    return msgspec.structs.replace(variant, id=f"{variant.class_name}-{digest}")


def _without_types(signature: Any) -> Any:
    """A call signature without the types of its tensors: a plan is the same for every type that takes the same path."""
    if isinstance(signature, tuple):
        return signature[:2] if signature[:1] == ("tensor",) else tuple(_without_types(part) for part in signature)
    return signature


def _guards(seen: Trace) -> Iterator[GuardRecord]:
    for guard in seen.guards:
        line = guard.span.lineno if guard.span is not None else None
        value = (
            repr(guard.value)
            if isinstance(guard.value, bool | int | float | str | type(None))
            else type(guard.value).__name__
        )
        yield GuardRecord(guard.kind, guard.expr, value, line)


def _stop(seen: Trace) -> str | None:
    if seen.stop is None:
        return None
    line = f"line {seen.stop.span.lineno}: " if seen.stop.span is not None else ""
    return f"{line}{seen.stop.reason}"


def _lines(traced: Traced, fusion: Fusion) -> tuple[int, ...]:
    spans = (traced.trace.span(node) for node in traced.matches[fusion.name].nodes)
    return tuple(sorted({span.lineno for span in spans if span is not None}))


def miss_record(fusion: str, miss: Miss, seen: Trace) -> MissRecord:
    """The nearest miss, with its line."""
    place: Place | None = place_of_class(seen.module_class)
    span = seen.span(miss.node) if miss.node is not None else None
    if span is not None:
        place = place_of_line(seen.module_class.__module__, seen.code.co_filename, span.lineno)
    return MissRecord(fusion, miss.reason, place)


def agrees(module: nn.Module, seen: Trace) -> bool:
    """Whether `module` has the value that the trace read, for each attribute it read."""
    for path, expected in seen.reads.items():
        found: Any = module
        for part in path.split("."):
            found = getattr(found, part, MISSING)
            if found is MISSING:
                break
        if found is not expected and not (type(found) is type(expected) and _equal(found, expected)):
            return False
    return True


def _equal(left: Any, right: Any) -> bool:
    if not isinstance(left, bool | int | float | str | tuple | list | dict | torch.dtype | torch.device | torch.Size):
        return False
    return bool(left == right)
