"""What transformers' own tensor-parallel plan says of a model, beside what was found: told where the two cannot both be right.

In: a model, its placed modules. Out: notes by name of the module. A placement is proved from the graph and never taken from a plan; that
one keeps whole, or gathers, what the other splits costs time and changes no number, and is not told. Cutting another side of a weight, or
cutting several projections in one weight as one, does change numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel
from vllm_layers_bridge.specs import LinearSpec, MergedLinearSpec, QKVLinearSpec

from tf_backend.plan.schema import ModulePlan

OUTPUTS, PARTS, INPUTS, INPUT_PARTS = (
    "its outputs",
    "the outputs of each of its projections",
    "its inputs",
    "its inputs, part by part",
)

_CUTS: Mapping[str, str] = {
    "colwise": OUTPUTS,
    "colwise_gather_output": OUTPUTS,
    "packed_colwise": PARTS,
    "rowwise": INPUTS,
    "rowwise_split_input": INPUTS,
    "packed_rowwise": INPUT_PARTS,
}
"""Style of transformers -> which side of the weight it cuts. Styles that keep a weight whole, or are about experts, are left out."""

_GATHERED = frozenset({"colwise_gather_output"})
"""After these every rank has the whole output, so that it does not matter where it was cut."""


def shipped_plan_notes(model: PreTrainedModel, modules: Sequence[ModulePlan]) -> dict[str, tuple[str, ...]]:
    """For each module whose linears transformers would cut otherwise, so that numbers differ: what it says and what was done."""
    shipped: Any = getattr(model, "tp_plan", None) or {}
    notes: dict[str, list[str]] = {}
    for name, ours in _cuts(modules):
        style = shipped.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        theirs = _CUTS.get(style) if isinstance(style, str) else None
        if theirs is None or theirs == ours or (style in _GATHERED and ours in {OUTPUTS, PARTS}):
            continue
        owner, _, leaf = name.rpartition(".")
        notes.setdefault(owner, []).append(
            f"`{leaf}`: transformers' own plan (`{style}`) splits {theirs}; the graph shows that {ours} are to be split"
        )
    return {owner: tuple(found) for owner, found in notes.items()}


def _cuts(modules: Sequence[ModulePlan]) -> Iterator[tuple[str, str]]:
    """Full name of each linear of the model that is split, and how."""
    for plan in modules:
        for layer in plan.layers:
            if isinstance(layer, LinearSpec) and layer.style != "replicated":
                yield plan.name, OUTPUTS if layer.style == "column" else INPUTS
            elif isinstance(layer, QKVLinearSpec) or (isinstance(layer, MergedLinearSpec) and layer.style == "column"):
                packed = {source.child for source in layer.sources if source.rows is not None}
                for child in dict.fromkeys(source.child for source in layer.sources):
                    yield f"{plan.name}.{child}", PARTS if child in packed else OUTPUTS
