"""What the experts of one block compute and where their weights lie, as data that travels through a plan as JSON.

In: nothing. Out: frozen structs. `moe_runner.build_experts` turns an `ExpertsSpec` into a layer of vLLM's runner.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from moe_runner.routers import Place, RouterSpec, Routing

Formula: TypeAlias = Literal[
    "silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu", "identity", "silu_clamped", "swiglu_oai"
]
Half: TypeAlias = Literal["gate", "up", "down"]


class Gate(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an expert computes between its two projections, of gate g and up u.

    ``silu`` and the other activations: ``f(g) * u``. ``silu_clamped``: ``silu(min(g, limit)) * clamp(u, -limit, limit)``.
    ``swiglu_oai``: with both clamped so, ``g * sigmoid(alpha * g) * (u + 1)``. Not `gated`: ``f(u)``, and there is no gate.
    """

    formula: Formula
    gated: bool = True
    limit: float | None = None
    alpha: float | None = None

    def __str__(self) -> str:
        numbers = ", ".join(
            f"{name} {value:g}" for name, value in (("limit", self.limit), ("alpha", self.alpha)) if value is not None
        )
        return self.formula + (f" ({numbers})" if numbers else "") + ("" if self.gated else ", no gate")


class ExpertTensor(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor of the experts' and what it holds.

    name: of the parameter, relative to the module of the experts.
    halves: the projections in it, in order along the output features. Two share them: one after the other, or `interleaved`.
    expert: whose it is; None when it holds all experts along its first axis, or folded into it (`packed`: [E * rows, columns]).
    transposed: each expert's matrix is [in, out].
    bias: it holds the biases of the projection, [E, out].
    """

    name: str
    halves: tuple[Half, ...]
    expert: int | None = None
    interleaved: bool = False
    transposed: bool = False
    packed: bool = False
    bias: bool = False


class SharedSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """Shared experts that the runner calls beside the routed ones and adds to them: ``child(x)``, or ``sigmoid(gate(x)) * child(x)``.

    child, gate: names of children of the block; `gate` is empty where there is none. block: its full name.
    ndim: dimensions of the hidden states that they are called with, [tokens, hidden] or [1, tokens, hidden].
    whole: what they give is whole on each tensor-parallel rank, and not a share of it; one rank alone adds it then.
    """

    block: str
    child: str
    gate: str = ""
    ndim: int = 2
    whole: bool = False


class ExpertsSpec(msgspec.Struct, frozen=True, tag="experts"):
    """Experts that are called with hidden states [tokens, hidden], ids [tokens, top_k] and weights [tokens, top_k].

    They give, for each token, the sum over its ids of weight times ``down(gate(projections of the hidden state))``.

    Or they are called with one tensor, rows of all tokens for each expert, [experts * tokens, hidden] or [experts, tokens, hidden], and
    give what each makes of its rows. All but `top_k` rows of a token are zeros, of which experts make zeros.

    arguments: where hidden states, ids and weights stand in the call; or the place of the one tensor.
    null: what ids of `num_experts` and above lead to: the hidden state itself, or nothing; None if there are none.
    runs_as: vLLM's name for the gate, once it is known what the engine's kernels take; see `engine_activation`.
    routing: how the runner chooses the experts itself; None where it is told. Where it does, the router's logits [tokens, experts] stand
    in the place of the weights, and what stands in that of the ids is not looked at.
    shared: what every token goes through beside them, of the same hidden states; None where there is none, or where the block adds it.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    gate: Gate
    tensors: tuple[ExpertTensor, ...]
    arguments: tuple[Place, ...]
    null: Literal["identity", "zero"] | None = None
    runs_as: str = ""
    name: str = ""
    routing: Routing | None = None
    shared: SharedSpec | None = None

    @property
    def takes_rows(self) -> bool:
        """Whether they are called with one tensor, the rows of each expert."""
        return len(self.arguments) == 1

    @property
    def rows_of_a_token(self) -> int:
        """How many rows the runner is given for each token."""
        return self.top_k if self.takes_rows else 1

    @property
    def has_bias(self) -> bool:
        """Whether the projections have biases."""
        return any(tensor.bias for tensor in self.tensors)


class WrittenExpertsSpec(msgspec.Struct, frozen=True, tag="written_experts"):
    """Experts called in the same way that run as they are written, whole on every rank, since no kernel computes what they do.

    Or a whole block, called with its tokens alone: then there is one argument, and `scores` is the length of the rows [tokens, scores]
    that it gives beside its output, None where it gives that alone.

    reason: why none does.
    """

    arguments: tuple[Place, ...]
    reason: str
    name: str = ""
    scores: int | None = None


AnyExpertsSpec: TypeAlias = ExpertsSpec | WrittenExpertsSpec | RouterSpec
"""What a module of a sparse block becomes."""
