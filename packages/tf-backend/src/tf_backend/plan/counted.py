"""Counts of the tokens in a row that a rewritten forward takes from the engine's positions: they are no mixing of tokens.

In: what the run on meta saw, the traces of the modules. Out: the mixing that is left, and a refusal where a count was not rewritten after
all.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator

from fx_match import Match, SourceSpan, canonical
from transformers import PreTrainedModel
from vllm_layers_bridge.fusions import RowPositions

from tf_backend.plan.mixing import Mixing
from tf_backend.plan.observe import Observation
from tf_backend.plan.refusals import mixing_refusals
from tf_backend.plan.schema import ModulePlan, Refusal, Variant
from tf_backend.plan.variants import VariantTable

_COUNT = "arange"


def take_counts(model: PreTrainedModel, seen: Observation, table: VariantTable) -> list[Mixing]:
    """Take from `seen.mixing` the counts that `RowPositions` rewrites; returns them."""
    taken = [mixing for mixing in seen.mixing if mixing.op == _COUNT and _is_rewritten(model, seen, table, mixing)]
    seen.mixing = [mixing for mixing in seen.mixing if mixing not in taken]
    return taken


def counting_modules(modules: tuple[ModulePlan, ...], variants: tuple[Variant, ...]) -> set[str]:
    """Names of the modules whose forward takes its count from the engine."""
    counting = {v.id for v in variants if any(fusion.name == RowPositions.name for fusion in v.fusions)}
    return {plan.name for plan in modules if plan.variant in counting}


def count_refusals(
    model: PreTrainedModel,
    seen: Observation,
    taken: list[Mixing],
    modules: tuple[ModulePlan, ...],
    variants: tuple[Variant, ...],
) -> Iterator[Refusal]:
    """Counts that were taken for rewritten in modules that are not."""
    rewritten = counting_modules(modules, variants)
    seen.mixing = [mixing for mixing in taken if mixing.module not in rewritten]
    yield from mixing_refusals(model, seen)


def _is_rewritten(model: PreTrainedModel, seen: Observation, table: VariantTable, mixing: Mixing) -> bool:
    call = seen.calls.get(mixing.module)
    if call is None or mixing.place is None:
        return False
    fusion = next((fusion for fusion in table.fusions if fusion.name == RowPositions.name), None)
    trace = table.trace_of(model.get_submodule(mixing.module), call)
    found = fusion.match(trace) if fusion is not None else None
    if (
        not isinstance(found, Match)
        or linecache.getline(trace.code.co_filename, mixing.place.line).strip() != mixing.place.text
    ):
        return False
    counts = [
        node for node in trace.graph.nodes if canonical(node) == _COUNT and _covers(trace.span(node), mixing.place.line)
    ]
    return bool(counts) and set(counts) <= set(found.nodes)  # one that stays, in the same line, is a mixing


def _covers(span: SourceSpan | None, line: int) -> bool:
    return span is not None and span.lineno <= line <= span.end_lineno
