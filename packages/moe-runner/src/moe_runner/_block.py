"""`SparseBlock`: what was read about one sparse mixture-of-experts block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Storage = Literal["stacked parameters", "module list"]
Score = Literal["softmax", "sigmoid"]
ScoreOrder = Literal["before", "after"]


@dataclass(frozen=True, slots=True)
class SparseBlock:
    """A module that holds experts and the choice among them. All names are relative to that module.

    experts: name of the child that holds the experts; "" where the block itself holds them.
    num_experts: E, routed experts only.
    storage: "stacked parameters" (one tensor holds all experts along its first axis) or "module list" (one child each).
    parameters: for stacked parameters their names; for a module list the parameter names of its first element.
    top_k: experts per token; None if not known.
    score: the function that turns router logits into weights; None if it was not found.
    score_order: whether the score function runs before the choice, or after it on what was chosen; None with `score`.
    shared_experts: name of the child that every token goes through beside the chosen experts; None if there is none, or
        if the forward was not followed that far.
    returns_router_logits: whether the block returns a tensor of scores over the experts beside its output; None if the
        forward was not followed to its end.
    called: False if the block was given no inputs, so that everything here comes from its structure.
    num_scores: among how many the choice is made: more than the experts where some of them do nothing; None if not known.
    evidence: what was read and where, one line each, "module:line: what".
    """

    experts: str
    num_experts: int
    storage: Storage
    parameters: tuple[str, ...]
    top_k: int | None
    score: Score | None
    score_order: ScoreOrder | None
    shared_experts: str | None
    returns_router_logits: bool | None
    called: bool
    evidence: tuple[str, ...]
    num_scores: int | None = None

    def describe(self) -> str:
        """One line for a person: "4 experts, top 2, softmax after top-k, experts as stacked parameters `experts.w`"."""
        parts = [f"{self.num_experts} experts"]
        if not self.called:
            parts.append("never called, so how tokens are routed is not known")
        else:
            parts.append(f"top {self.top_k}" if self.top_k is not None else "top-k not known")
            parts.append(f"{self.score} {self.score_order} top-k" if self.score else "score function not known")
        place = self.experts if self.storage == "module list" else self.parameters[0]
        parts.append(f"experts as {self.storage}" + (f" `{place}`" if place else ""))
        if self.shared_experts is not None:
            parts.append(f"shared experts `{self.shared_experts}`")
        if self.returns_router_logits:
            parts.append("returns its router logits")
        return ", ".join(parts)
