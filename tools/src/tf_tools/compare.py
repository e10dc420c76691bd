"""Compare what a server answered with the reference: the whole vocabulary, at every position.

served = serve(...).runs[0]
report = compare_run(reference_for(folder, served), served)
assert report.ok, str(report)
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from tf_tools.sequences import Sequence

__all__ = ["MARGIN", "TOLERANCE", "ComparisonError", "Difference", "Report", "TokenMismatch", "compare_run"]

TOLERANCE = 2e-3
"""Largest allowed absolute difference of a log-probability."""

MARGIN = 2 * TOLERANCE
"""A greedy token must be the reference's where the reference's best is ahead of its second by more than this."""


class ComparisonError(ValueError):
    """The two sides cannot be compared: another number of sequences, other positions, another vocabulary."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two distributions are furthest apart. `position` t predicts token t + 1."""

    sequence: int
    position: int
    phase: str
    token: int
    reference: float
    served: float
    difference: float

    def __str__(self) -> str:
        return (
            f"sequence {self.sequence}, position {self.position} ({self.phase}), token {self.token}: "
            f"reference {self.reference:.6f}, served {self.served:.6f}, difference {self.difference:.3g}"
        )


@dataclass(frozen=True, slots=True)
class TokenMismatch:
    """A generated token that is not the reference's, at a position where the reference is not in doubt."""

    sequence: int
    step: int
    expected: int
    served: int
    margin: float

    def __str__(self) -> str:
        return (
            f"sequence {self.sequence}, generated token {self.step}: expected {self.expected}, served {self.served} "
            f"(the reference's margin is {self.margin:.3g})"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a comparison.

    Attributes:
        differences: for each sequence, [P + n - 1 - start] float32: the largest absolute difference at each position; inf where
            one side is infinite or not a number and the other is not the same.
        starts: for each sequence, the position of its first difference.
        where: the worst position of all; None only when nothing was compared, which is not `ok`.
        mismatches: wrong greedy tokens.
        tolerance: what `worst` was held against.
    """

    differences: tuple[Tensor, ...]
    starts: tuple[int, ...]
    where: Difference | None
    mismatches: tuple[TokenMismatch, ...]
    tolerance: float

    @property
    def worst(self) -> float:
        """The largest absolute difference of a log-probability over all sequences, positions and tokens."""
        return self.where.difference if self.where else float("inf")

    @property
    def ok(self) -> bool:
        return self.worst <= self.tolerance and not self.mismatches

    def __str__(self) -> str:
        rows = sum(d.numel() for d in self.differences)
        verdict = "equal" if self.ok else "NOT equal"
        head = f"{verdict}: {rows} positions in {len(self.differences)} sequences, worst {self.worst:.3g}"
        lines = [f"{head} (tolerance {self.tolerance:g})"]
        lines += [f"  worst at {self.where}"] if self.where else ["  nothing was compared"]
        above = [(i, d) for i, d in enumerate(self.differences) if bool((d > self.tolerance).any())]
        for i, d in above[:8]:
            positions = (d > self.tolerance).nonzero().flatten().tolist()
            first = self.starts[i] + positions[0]
            lines.append(f"  sequence {i}: {len(positions)} of {d.numel()} positions differ, from {first} on")
        lines += [f"  {m}" for m in self.mismatches[:8]]
        return "\n".join(lines)


def compare_run(
    reference: SequenceOf[Tensor],
    served: SequenceOf[Sequence],
    *,
    tolerance: float = TOLERANCE,
    margin: float | None = None,
) -> Report:
    """Hold a server's answers against the reference over the same tokens.

    Args:
        reference: for each sequence [T, vocab] with T = P + n, as `reference_for` gives, over the served tokens.
        served: what the server answered.
        tolerance: largest allowed absolute difference.
        margin: see `MARGIN`; twice the tolerance by default.

    Raises:
        ComparisonError: another number of sequences, positions or vocabulary entries: nothing is left out in silence.
    """
    if len(reference) != len(served):
        raise ComparisonError(f"{len(reference)} reference sequences, {len(served)} served")
    margin = 2 * tolerance if margin is None else margin
    differences: list[Tensor] = []
    worst: Difference | None = None
    mismatches: list[TokenMismatch] = []
    for i, (expected, answer) in enumerate(zip(reference, served, strict=True)):
        total = len(answer.token_ids)
        if expected.shape[0] != total:
            raise ComparisonError(f"sequence {i}: the reference has {expected.shape[0]} positions, expected {total}")
        if expected.shape[1] != answer.logprobs.shape[1]:
            raise ComparisonError(
                f"sequence {i}: the reference's vocabulary has {expected.shape[1]} entries, "
                f"the server's {answer.logprobs.shape[1]}"
            )
        rows = expected[answer.start : total - 1].to(torch.float64)
        gap = _gap(rows, answer.logprobs.to(torch.float64))
        differences.append(gap.amax(dim=-1).float() if gap.numel() else torch.zeros(0))
        here = _worst(i, gap, rows, answer)
        if here and (worst is None or here.difference > worst.difference):
            worst = here
        mismatches += _mismatches(i, rows, answer, margin)
    return Report(tuple(differences), tuple(s.start for s in served), worst, tuple(mismatches), tolerance)


def _gap(expected: Tensor, found: Tensor) -> Tensor:
    gap = (expected - found).abs()
    same_infinity = torch.isinf(expected) & (expected == found)
    gap = torch.where(same_infinity, torch.zeros_like(gap), gap)
    return torch.where(torch.isnan(gap), torch.full_like(gap, float("inf")), gap)


def _worst(index: int, gap: Tensor, expected: Tensor, answer: Sequence) -> Difference | None:
    if not gap.numel():
        return None
    row, token = divmod(int(gap.argmax()), gap.shape[1])
    position = answer.start + row
    phase = "prompt" if position < len(answer.prompt) - 1 else "generated"
    return Difference(
        index,
        position,
        phase,
        token,
        float(expected[row, token]),
        float(answer.logprobs[row, token]),
        float(gap[row, token]),
    )


def _mismatches(index: int, expected: Tensor, answer: Sequence, margin: float) -> list[TokenMismatch]:
    found = []
    for step, token in enumerate(answer.tokens):
        best = expected[len(answer.prompt) - 1 - answer.start + step].topk(2)
        ahead, choice = float(best.values[0] - best.values[1]), int(best.indices[0])
        if token != choice and ahead > margin:
            found.append(TokenMismatch(index, step, choice, token, ahead))
    return found
