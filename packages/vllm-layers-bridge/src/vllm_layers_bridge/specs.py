"""What a fused or replaced layer is, as data: which children it takes, which sizes it has; nothing on how vLLM spells it.

In: nothing. Out: frozen structs that travel through a plan as JSON. `vllm_layers_bridge.layers` turns one into a vLLM layer.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Style: TypeAlias = Literal["replicated", "column", "row"]
"""How a weight is laid over tensor-parallel ranks: whole on each, split on outputs, split on inputs."""


class Source(msgspec.Struct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """One projection that goes into a merged layer."""

    child: str
    """Name of the child inside the module, e.g. ``q_proj``."""
    shard: str | int | None
    """Identifier of its part in the merged weight: ``"q"``, ``"k"``, ``"v"``, an index, or None when it is the whole."""
    size: int
    """Output features over all ranks."""
    rows: tuple[int, int] | None = None
    """First output feature of the child that goes in, and the one after the last; None when all do."""
    transposed: bool = False
    """Whether the child keeps its weight as [in, out], as transformers' `Conv1D` does."""


class LinearSpec(msgspec.Struct, frozen=True, tag="linear"):
    """``y = x W^T + b`` in place of a child: `style` says how it is laid over ranks.

    `transposed`: the child keeps W^T, [in, out], as transformers' `Conv1D` does. `runs` and `copies`: of a column split, how many runs of
    outputs there are where ranks outnumber them, and on how many ranks each of them is. `reduces`: a row split sums over ranks itself;
    otherwise what it gives is the share of a rank, and who takes it sums.
    """

    name: str
    in_features: int
    out_features: int
    bias: bool
    style: Style = "replicated"
    transposed: bool = False
    runs: int | None = None
    copies: int = 1
    reduces: bool = True


class MergedLinearSpec(msgspec.Struct, frozen=True, tag="merged_linear"):
    """Several linears that read one input, their outputs side by side; or parts of one linear, each to be sharded for itself."""

    name: str
    sources: tuple[Source, ...]
    in_features: int
    bias: bool
    style: Style = "column"


class QKVLinearSpec(msgspec.Struct, frozen=True, tag="qkv_linear"):
    """Query, key and value projections of one input, sharded by heads.

    `sizes_attribute` names the attribute of the module from which rewritten code reads the local split sizes.
    """

    name: str
    sources: tuple[Source, Source, Source]
    in_features: int
    bias: bool
    head_dim: int
    value_head_dim: int
    num_heads: int
    num_kv_heads: int
    sizes_attribute: str


class ActivationAndMulSpec(msgspec.Struct, frozen=True, tag="activation_and_mul"):
    """``activation(x[..., :n]) * x[..., n:]`` over the last axis of a merged gate and up projection."""

    name: str
    activation: str


class RMSNormSpec(msgspec.Struct, frozen=True, tag="rms_norm"):
    """``x / sqrt(mean(x^2) + eps) * (offset + weight)`` in place of a whole module; offset is 0 or 1.

    `scaled_in`: the type in which the weight is multiplied in, float32 ("wide") or that of the input; None where it is neither.
    `pieces`: runs of the normalised axis over tensor-parallel ranks, one on each, fewer where several hold the same; 1: not split.
    """

    hidden_size: int
    eps: float
    offset: float
    has_weight: bool
    name: str = ""
    scaled_in: Literal["wide", "input"] | None = "wide"
    pieces: int = 1


class PositionTableSpec(msgspec.Struct, frozen=True, tag="position_table"):
    """Values for each position, looked up, in place of a module whose values follow the longest position that it is given.

    `beyond`: positions from `constant_below` on share another state of the module, or each has its own; "same": there are none.
    """

    name: str
    calls: int
    """In how many ways the module is called; each has a table."""
    constant_below: int
    beyond: Literal["same", "another", "each its own"]


Pairing: TypeAlias = Literal["halves", "adjacent"]
"""Which two entries of a head are turned together: i and i + n of the first 2 n, or 2 i and 2 i + 1."""

Angles: TypeAlias = Literal["twice", "first half", "once"]
"""Cosines and sines as a forward has them: each stands twice, where its two entries do; only the first half is read; each stands once."""


class RotarySpec(msgspec.Struct, frozen=True, tag="rotary"):
    """Turns pairs of entries of each head by an angle for each token: what a call in the forward did.

    Heads are [1, heads, tokens, head_dim] where `token_axis` is 2, [1, tokens, heads, head_dim] where it is 1. `in_place`: what is turned
    is read by nothing else, so that it may be overwritten. Widths are those of what the layer is called with.
    """

    name: str
    pairing: Pairing
    angles: Angles
    token_axis: Literal[1, 2]
    in_place: bool


class EmbeddingSpec(msgspec.Struct, frozen=True, tag="embedding"):
    """A token embedding, its rows split over ranks."""

    name: str
    num_embeddings: int
    embedding_dim: int


class HeadLinearSpec(msgspec.Struct, frozen=True, tag="lm_head"):
    """The projection onto the vocabulary; `tied_to` is the full name of the embedding whose weight it shares."""

    name: str
    num_embeddings: int
    embedding_dim: int
    bias: bool
    tied_to: str | None = None


LayerSpec: TypeAlias = (
    LinearSpec
    | MergedLinearSpec
    | QKVLinearSpec
    | ActivationAndMulSpec
    | RMSNormSpec
    | PositionTableSpec
    | RotarySpec
    | EmbeddingSpec
    | HeadLinearSpec
)
"""A layer with ``name == ""`` takes the place of the module itself; any other becomes that attribute of it."""


class AttentionSpec(msgspec.Struct, frozen=True):
    """One call of the attention interface, as the model made it.

    Sizes are per model, not per rank. `sliding_window` counts the tokens that a query sees, itself included. `sinks` names the parameter
    of the calling module, [num_heads], whose entries are one more score in the softmax of each head, with no value behind it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    scale: float
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    sinks: str | None = None

    @property
    def cache_head_dim(self) -> int:
        """Width at which the engine keeps both key and value heads: the narrower of the two is padded with zeros."""
        return max(self.head_dim, self.value_head_dim)


class LatentSpec(msgspec.Struct, frozen=True):
    """Attention whose keys and values are made, by the child `projection`, of `rank` features of each token.

    `rope` more are shared by the keys of all heads. Each head of a key is what the projection gives for it, then the shared features; the
    rest of what it gives is its value.
    """

    projection: str
    rank: int
    rope: int
