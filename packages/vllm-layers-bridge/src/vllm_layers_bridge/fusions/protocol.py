"""What a fusion is: find it in a trace, check an instance, rewrite the source, name the layers.

A fusion either rewrites the forward of the module that it matched, or takes the place of the whole module (`replaces_module`).
Finding and rewriting happen once per variant of a class; checking and naming layers happen for each instance, since instances of one
variant share code and not sizes, nor what their children are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ast_rewrite import Patch
from fx_match import Match, Miss, Trace
from torch import Tensor, nn

from vllm_layers_bridge.fusions.children import is_plain_linear
from vllm_layers_bridge.specs import AttentionSpec, LayerSpec, Pairing

__all__ = ["Fusion", "ModuleFacts", "is_plain_linear"]


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """What is known of one instance beyond its own tensors.

    A fusion that needs what is None here refuses.
    """

    name: str
    attention: tuple[AttentionSpec, ...] = ()
    """Calls of the attention interface that this module makes, in order."""
    args: tuple[Any, ...] | None = None
    """Positional arguments of its first call, tensors on meta."""
    kwargs: Mapping[str, Any] | None = None
    """Keyword arguments of its first call, tensors on meta."""
    holds_twice: Callable[[Tensor, Pairing], bool] | None = None
    """Whether the values in one of these tensors come in twos, of which the second equals the first, for any tokens that are given."""


@runtime_checkable
class Fusion(Protocol):
    """One fusion; see the modules of `vllm_layers_bridge.fusions` for what one looks like."""

    name: str
    replaces_module: bool

    def is_candidate(self, trace: Trace) -> bool:
        """Whether a miss on this module would be worth telling: it has the parts, if not the shape."""
        ...

    def match(self, trace: Trace) -> Match | Miss:
        """Find the fusion in the trace of a forward; a Miss says in a sentence why not, and its node where."""
        ...

    def check(self, match: Match, module: nn.Module, facts: ModuleFacts) -> None:
        """Raise `NotFusable` where fusing this instance, which may not be the traced one, would not be right."""
        ...

    def rewrite(self, match: Match, trace: Trace, patch: Patch) -> None:
        """Edit the forward; raises `ast_rewrite.Refused` where the edit cannot be proved safe."""
        ...

    def layers(self, match: Match, module: nn.Module, facts: ModuleFacts) -> tuple[LayerSpec, ...]:
        """The layers that the instance gets. Called after `check` let it pass."""
        ...
