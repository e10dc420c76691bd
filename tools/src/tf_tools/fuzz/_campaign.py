"""Run many examples of one kind through the property, and shrink the first that does not hold.

In: a kind, how many examples, a seed. Out: a `Tally`. Drawing, shrinking and replaying are hypothesis' own.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from tf_tools.fuzz._attention import attentions, packed_attentions
from tf_tools.fuzz._mlp import mlps, packed_mlps
from tf_tools.fuzz._norm import normed_pairs, norms
from tf_tools.fuzz._pair import pairs
from tf_tools.fuzz._program import Program
from tf_tools.fuzz._property import Counterexample, Verdict, check


@dataclass(frozen=True, slots=True)
class Kind:
    """How programs of a kind are drawn, and its share among all examples."""

    strategy: SearchStrategy[Program]
    share: int
    about: str


KINDS: Mapping[str, Kind] = {
    "mlp": Kind(mlps(), 6, "gate and up projections"),
    "packed_mlp": Kind(packed_mlps(), 5, "gate and up in one projection"),
    "qkv": Kind(attentions(), 6, "query, key and value projections"),
    "packed_qkv": Kind(packed_attentions(), 4, "query, key and value in one projection"),
    "norm": Kind(norms(), 4, "root-mean-square norms"),
    "normed_pair": Kind(normed_pairs(), 2, "a norm between two linears"),
    "pair": Kind(pairs(), 3, "anything between two linears"),
}
"""By name."""


@dataclass(slots=True)
class Tally:
    """What came of the examples of one kind.

    ran: examples of which numbers were compared; the rest do not run as they are written. compared: comparisons in all.
    """

    kind: str
    examples: int = 0
    ran: int = 0
    fused: int = 0
    split: int = 0
    compared: int = 0
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    counterexample: Counterexample | None = None

    def add(self, verdict: Verdict) -> None:
        """Count one example."""
        self.examples += 1
        self.ran += verdict.compared > 0
        self.fused += verdict.fused > 0
        self.split += verdict.split > 0
        self.compared += verdict.compared
        if not verdict.fused:
            self.reasons.update({_general(reason) for reason in verdict.reasons} or {"no candidate"})


def shares(examples: int, kinds: tuple[str, ...] = tuple(KINDS)) -> dict[str, int]:
    """How many examples of each kind make up `examples`."""
    total = sum(KINDS[name].share for name in kinds)
    return {name: -(-examples * KINDS[name].share // total) for name in kinds}


def run_kind(
    kind: str,
    examples: int,
    *,
    number: int | None = 0,
    shrink: bool = True,
    on_found: Callable[[Counterexample], None] = lambda problem: None,
) -> Tally:
    """Draw up to `examples` programs and check each.

    Args:
        number: the seed; None for the same programs every time, whatever the order of tests.
        shrink: whether the first program that fails is made smaller.
        on_found: called with that one, before it is made smaller, which can take minutes.
    """
    tally, start = Tally(kind), time.perf_counter()

    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=number is None,
        report_multiple_bugs=False,
        print_blob=False,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example),
    )
    @given(KINDS[kind].strategy)
    def holds(program: Program) -> None:
        try:
            verdict = check(program)
        except Counterexample as problem:
            if tally.counterexample is None:
                on_found(problem)
            tally.counterexample = problem
            raise
        if tally.counterexample is None:
            tally.add(verdict)

    with contextlib.suppress(Counterexample):  # the last that was tried is the smallest
        (holds if number is None else seed(number)(holds))()
    tally.seconds = time.perf_counter() - start
    return tally


def _general(reason: str) -> str:
    """A reason without the names and places of one example."""
    reason = re.sub(r"`[^`]*`", "`…`", reason)
    reason = re.sub(r"/\S+\.py:\d+", "…", re.sub(r"\s*\(at [\d:\- ]+\)", "", reason))
    return re.sub(r"\d+", "N", reason)
