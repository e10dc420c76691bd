"""Gates and the names under which vLLM's runner computes them.

In: a `Gate`, the names that the engine's kernels take. Out: the name to build with, or None where there is none: nothing is approximated.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from moe_runner.specs import Gate

OAI_LIMIT, OAI_ALPHA = 7.0, 1.702
"""Constants of vLLM's ``swigluoai``, written into its kernels."""

CLAMPED = "silu_clamped"
"""Our name for vLLM's ``silu`` with a limit; a kernel that takes ``silu`` may leave the limit out without a word."""


@dataclass(frozen=True, slots=True)
class EngineActivation:
    """What vLLM is asked for. `interleaved`: gate and up projections alternate in its merged weight."""

    name: str
    limit: float | None = None
    alpha: float | None = None
    beta: float | None = None
    interleaved: bool = False


ACTIVATIONS: dict[str, Gate] = {
    "silu": Gate("silu"),
    "gelu": Gate("gelu"),
    "gelu_tanh": Gate("gelu_tanh"),
    "swigluoai": Gate("swiglu_oai", limit=OAI_LIMIT, alpha=OAI_ALPHA),
    "silu_no_mul": Gate("silu", gated=False),
    "gelu_no_mul": Gate("gelu", gated=False),
    "gelu_tanh_no_mul": Gate("gelu_tanh", gated=False),
    "relu2_no_mul": Gate("relu2", gated=False),
}
"""vLLM's names for gates without constants of the model's own."""

_ADJUSTABLE = {"silu_clamped": CLAMPED, "swiglu_oai": "swigluoai_uninterleave"}


def engine_activation(gate: Gate, available: Collection[str]) -> str | None:
    """The name in `available` that computes `gate`, or None."""
    return next((name for name in names_of(gate) if name in available), None)


def names_of(gate: Gate) -> tuple[str, ...]:
    """All names that compute `gate`, those for which the engine needs no constants first."""
    fixed = [name for name, computed in ACTIVATIONS.items() if computed == gate]
    adjustable = [_ADJUSTABLE[gate.formula]] if gate.formula in _ADJUSTABLE else []
    return (*fixed, *adjustable)


def asked_of_engine(gate: Gate, name: str) -> EngineActivation:
    """What to build for a gate that runs as `name`."""
    if name == CLAMPED:
        return EngineActivation("silu", limit=gate.limit)
    if name == _ADJUSTABLE["swiglu_oai"]:
        return EngineActivation(name, limit=gate.limit, alpha=gate.alpha, beta=1.0)
    return EngineActivation(name, interleaved=name == "swigluoai")
