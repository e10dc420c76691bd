"""The plan as data: what each module becomes, why, and what the model as a whole needs from the engine.

In: nothing. Out: frozen structs; `Plan.to_json`, `Plan.from_json`, `Plan.hash`. No vLLM, no torch, no GPU.
"""

from __future__ import annotations

import hashlib
from typing import Literal, TypeAlias

import msgspec
from moe_runner.specs import AnyExpertsSpec, ExpertTensor
from vllm_layers_bridge.specs import AttentionSpec, HeadLinearSpec, LatentSpec, LayerSpec

SCHEMA_VERSION = 1


class Place(msgspec.Struct, frozen=True):
    """A place in source: file as `module.name` of the Python module that holds it, line from 1."""

    module: str
    line: int
    text: str = ""


class GuardRecord(msgspec.Struct, frozen=True):
    """A fact about an instance that the traced forward depended on."""

    kind: str
    name: str
    value: str
    line: int | None = None


class FusionRecord(msgspec.Struct, frozen=True):
    """A fusion that was applied to a variant, in the order of application."""

    name: str
    lines: tuple[int, ...]
    replaces_module: bool = False


class MissRecord(msgspec.Struct, frozen=True):
    """A fusion that came close and was not applied: the nearest miss and its line."""

    fusion: str
    reason: str
    place: Place | None = None


class TraceRecord(msgspec.Struct, frozen=True):
    """How much of the forward was traced; `stop` says where and why when it is not all of it."""

    nodes: int
    complete: bool
    stop: str | None = None


class Variant(msgspec.Struct, frozen=True):
    """One class, with the facts under which its forward takes one path.

    `rewritten` is the new source of the forward, or None when the forward stays or the module is replaced whole.
    """

    id: str
    cls: str
    place: Place | None
    guards: tuple[GuardRecord, ...]
    trace: TraceRecord
    fusions: tuple[FusionRecord, ...]
    misses: tuple[MissRecord, ...]
    source_sha256: str | None = None
    rewritten: str | None = None
    rewritten_sha256: str | None = None
    diff: str | None = None

    @property
    def class_name(self) -> str:
        """Name of the class alone, e.g. ``Qwen3MLP``."""
        return self.cls.rpartition(":")[2]


class LocalAttribute(msgspec.Struct, frozen=True):
    """A size that a module's forward reads from the module: `whole` in the model, `local` on a tensor-parallel rank."""

    name: str
    whole: int
    local: int


class ParameterShard(msgspec.Struct, frozen=True):
    """A parameter that stays where it is, below a module, and of which each rank holds one of `pieces` runs along `axis`."""

    name: str
    axis: int
    pieces: int


class ModulePlan(msgspec.Struct, frozen=True):
    """What one module instance becomes.

    keep: as transformers wrote it. rewrite: forward rewritten, `layers` added. replace: one layer in its place.
    `variant` is None for plain torch layers, which have no forward of the model's own. On several ranks `sizes` and `shards` say which
    of its numbers and parameters are those of one rank.
    """

    name: str
    action: Literal["keep", "rewrite", "replace"]
    variant: str | None = None
    layers: tuple[LayerSpec | AnyExpertsSpec, ...] = ()
    sizes: tuple[LocalAttribute, ...] = ()
    shards: tuple[ParameterShard, ...] = ()


class AttentionPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """One attention layer of the engine: which module calls it, and with what.

    `holder` names the child that stands for the module in this call, where it makes several in one run; empty where it makes one. `turn`
    counts from 0 the runs of a module that attends in several; None where it does in one. `chunk`: tokens
    see their own chunk of so many alone, so that sequences end with the first. `latent`: the forward gives the interface what keys and
    values are made of, and that is cached; `spec` says what they would be.
    """

    module: str
    index: int
    spec: AttentionSpec
    holder: str = ""
    turn: int | None = None
    chunk: int | None = None
    latent: LatentSpec | None = None


class LatentPlan(msgspec.Struct, frozen=True):
    """Attention whose keys and values are computed from `rank` features of each token, beside `rope` that all heads' keys share.

    `expanded` and `compressed`: numbers in the cache for each token and layer, over all ranks, of keys and values and of what they are made
    of. `reason` is why it is cached expanded, empty where it is cached compressed.
    """

    cls: str
    layers: int
    rank: int
    rope: int
    expanded: int
    compressed: int
    reason: str

    def __str__(self) -> str:
        expanded, compressed = (f"{2 * numbers:,}" for numbers in (self.expanded, self.compressed))
        if not self.reason:
            return (
                f"{self.cls}: what keys and values are made of ({self.rank} + {self.rope}) is cached in their place, {compressed} bytes "
                f"per token and layer in 16 bits instead of {expanded}"
            )
        return (
            f"{self.cls}: keys and values are cached expanded, {expanded} bytes per token and layer in 16 bits; compressed "
            f"({self.rank} + {self.rope}) they would take {compressed}: {self.reason}"
        )


class ExpertsPlan(msgspec.Struct, frozen=True):
    """The experts of one sparse block: where they are, what was read of them, how they run.

    `runs`: in the engine's runner, or as written, whole on every rank, and `why_written` is the reason. `routing`: inside when the engine
    chooses the experts, as `router` says; outside when the model's own code does, and `why_outside` is the fact that prevents the other.
    `shared`: the child that every token goes through beside the chosen experts, empty where there is none; `shared_runs`: inside when the
    runner calls it and adds it, outside when the block does, and `why_shared_outside` is the fact that prevents the other.
    """

    block: str
    experts: str
    cls: str
    description: str
    computes: str
    runs: Literal["runner", "as written"] = "runner"
    why_written: str = ""
    routing: Literal["outside", "inside"] = "outside"
    why_outside: str = ""
    router: str = ""
    shared: str = ""
    shared_runs: Literal["", "outside", "inside"] = ""
    why_shared_outside: str = ""


class PlacementRecord(msgspec.Struct, frozen=True):
    """How the modules of one class lie over tensor-parallel ranks; why not split, and the parameters that each rank holds whole.

    `notes` are what is worth knowing of a split: which linears stay whole, where transformers' own plan says otherwise.
    """

    cls: str
    placement: Literal["split", "replicated"]
    count: int
    reason: str = ""
    replicated_parameters: int = 0
    notes: tuple[str, ...] = ()


class PositionRows(msgspec.Struct, frozen=True):
    """A table that `module` looks up by position: it has `rows`, and `end` is the first position for which there is none."""

    module: str
    rows: int
    end: int


class StagesPlan(msgspec.Struct, frozen=True):
    """Pipeline stages: stage `r` has the decoder layers from `bounds[r]` to the one before `bounds[r + 1]`.

    A layer takes its hidden state [1, tokens, width] under `argument`, a position or a name, and returns it as entry `output` of `entries`,
    or as the whole where that is None. `after`: modules between the last layer and the head, which only the last stage has, as it has the
    head. The embedding is the first stage's, and the last stage's too where the head is `tied` to it.
    """

    bounds: tuple[int, ...]
    argument: int | str
    output: int | None
    entries: int
    width: int
    after: tuple[str, ...]
    embedding: str
    head: str
    tied: bool


class HeadStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step between the last hidden state and the logits: canonical op and its constants, or ``call`` of `module`, by full name.

    The value so far stands at the position of `"x"` in `args`.
    """

    op: str
    args: tuple[str | int | float, ...]
    module: str = ""


class HeadPlan(msgspec.Struct, frozen=True):
    """From the last hidden state to the logits, read from the traced head."""

    before: tuple[HeadStep, ...]
    linear: HeadLinearSpec
    after: tuple[HeadStep, ...]
    place: Place | None = None

    @property
    def modules(self) -> tuple[str, ...]:
        """Full names of the modules that run before the projection, outside of the decoder."""
        return tuple(dict.fromkeys(step.module for step in self.before if step.module))


class WeightRule(msgspec.Struct, frozen=True, omit_defaults=True):
    """One checkpoint tensor, or some rows of it: where it goes, which shard it is, and the shape that the whole must have.

    `transposed`: its two axes are swapped before anything else, `rows` included. `experts`: what it holds of experts, which are loaded one
    by one. `runs` and `copies`: each of `runs` equal runs of its first axis is loaded `copies` times, side by side, for ranks that
    outnumber them.
    """

    source: str
    target: str
    shard: str | int | None
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    transposed: bool = False
    experts: ExpertTensor | None = None
    runs: int = 1
    copies: int = 1


class Refusal(msgspec.Struct, frozen=True):
    """Why the model cannot be served: what was found, in which module, at which line, and what to do."""

    reason: str
    module: str
    place: Place | None
    remedy: str

    def __str__(self) -> str:
        where = f" in `{self.module}`" if self.module else ""
        at = f" ({self.place.module}, line {self.place.line})" if self.place else ""
        return f"{self.reason}{where}{at}. {self.remedy}"


class Parallel(msgspec.Struct, frozen=True):
    """Ranks that the model is planned for.

    experts: whole experts are dealt out over the tensor-parallel ranks, not parts of each.
    data: ranks that serve requests of their own, and share their experts: those are split or dealt out over the tensor-parallel
        ranks of all of them.
    redundant: places for experts beyond one for each, over all ranks.
    """

    tensor: int = 1
    pipeline: int = 1
    experts: bool = False
    data: int = 1
    redundant: int = 0

    @property
    def expert_ranks(self) -> int:
        """Ranks that the experts of a layer lie on."""
        return self.tensor * self.data


class Provenance(msgspec.Struct, frozen=True):
    """All that the plan depends on, so that two plans can be compared and a stale one be told."""

    architecture: str
    model_type: str
    config_sha256: str
    transformers: str
    torch: str
    packages: dict[str, str]
    capabilities: str
    capabilities_sha256: str
    parallel: Parallel
    sources_sha256: str = ""
    """Of the Python files that the model's classes are written in, whether or not their forwards are rewritten."""


class Plan(msgspec.Struct, frozen=True):
    """What serving a model will do, before anything is built.

    `refusals` is empty when the model can be served. `summary()` counts fusions by class.
    """

    provenance: Provenance
    base: str
    """Full name of the decoder inside the head model, e.g. ``model``."""
    layers: str
    """Full name of the list of decoder layers, e.g. ``model.layers``."""
    variants: tuple[Variant, ...]
    modules: tuple[ModulePlan, ...]
    attention: tuple[AttentionPlan, ...]
    head: HeadPlan | None
    weights: tuple[WeightRule, ...]
    buffers: tuple[str, ...]
    """Buffers that no checkpoint holds: computed again at load."""
    refusals: tuple[Refusal, ...] = ()
    placement: tuple[PlacementRecord, ...] = ()
    """Empty on one rank."""
    experts: tuple[ExpertsPlan, ...] = ()
    """One for each sparse block."""
    stages: StagesPlan | None = None
    """None for one stage."""
    latent: tuple[LatentPlan, ...] = ()
    """One for each class and size of attention that caches more than its keys and values are made of."""
    position_rows: tuple[PositionRows, ...] = ()
    """Learned position embeddings, and whatever else is looked up by position."""
    schema: int = SCHEMA_VERSION

    @property
    def is_served(self) -> bool:
        """Whether nothing stands against serving the model."""
        return not self.refusals

    def to_json(self) -> bytes:
        """Canonical JSON: the same plan gives the same bytes."""
        return msgspec.json.encode(self, order="deterministic")

    @classmethod
    def from_json(cls, data: bytes | str) -> Plan:
        """The inverse of `to_json`; raises `msgspec.ValidationError` for anything that is not a plan."""
        return msgspec.json.decode(data, type=cls)

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON, 64 hexadecimal digits."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def variant(self, identity: str) -> Variant:
        """The variant with that id; KeyError when there is none."""
        for variant in self.variants:
            if variant.id == identity:
                return variant
        raise KeyError(identity)

    def summary(self) -> tuple[FusionCount, ...]:
        """How many instances of each class each fusion was applied to, in order of first appearance."""
        counts: dict[tuple[str, str], int] = {}
        by_id = {variant.id: variant for variant in self.variants}
        for module in self.modules:
            if module.variant is None:
                continue
            variant = by_id[module.variant]
            for fusion in variant.fusions:
                key = (variant.class_name, fusion.name)
                counts[key] = counts.get(key, 0) + 1
        return tuple(FusionCount(cls, fusion, count) for (cls, fusion), count in counts.items())


class FusionCount(msgspec.Struct, frozen=True):
    """One line of the fusion summary."""

    cls: str
    fusion: str
    count: int


Action: TypeAlias = Literal["keep", "rewrite", "replace"]
