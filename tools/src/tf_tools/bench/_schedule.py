"""Which process starts when and where: pairs of all arms, the order turned by one from pair to pair.

    order(("a", "b", "c"), 0) = a b c      order(..., 1) = b c a      order(..., 2) = c a b

All arms of a pair run on the same cores. They are loaded one after the other and then measure in turns, a run each, the
order turned again from round to round, so that neither the core nor drift of the machine is a difference between them.
The cores change only after each arm has been first on them once: changed with every pair, two arms on two cores would
have each arm first on one core always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tf_tools.bench._errors import BenchError

T = TypeVar("T")

PRIME = -1
"""The pair of a start that fills an arm's caches and is compared with nothing: its load time is the cold one."""

MODES = ("eager", "compiled")


@dataclass(frozen=True, slots=True)
class Start:
    """One process to be started; `position` is its place within its pair."""

    mode: str
    pair: int
    arm: str
    position: int
    cores: tuple[int, ...]


def order(arms: Sequence[T], pair: int) -> tuple[T, ...]:
    """The arms in the order in which they start in this pair; or whatever takes turns, in this round."""
    turn = pair % len(arms)
    return (*arms[turn:], *arms[:turn])


def slots(cores: Sequence[int], threads: int) -> tuple[tuple[int, ...], ...]:
    """Disjoint sets of `threads` cores; what is left over is not used.

    Raises:
        BenchError: there are fewer cores than threads.
    """
    if not 1 <= threads <= len(cores):
        raise BenchError(
            f"{threads} threads on {len(cores)} cores: at least one thread, and a core for each, is needed"
        )
    return tuple(tuple(cores[at : at + threads]) for at in range(0, len(cores) - threads + 1, threads))


def primes(mode: str, arms: Sequence[str], places: Sequence[tuple[int, ...]]) -> tuple[Start, ...]:
    """The first start of each arm in a mode."""
    return tuple(Start(mode, PRIME, arm, position, places[0]) for position, arm in enumerate(arms))


def pair_starts(mode: str, pair: int, arms: Sequence[str], places: Sequence[tuple[int, ...]]) -> tuple[Start, ...]:
    """The starts of one pair, in their order."""
    place = places[(pair // len(arms)) % len(places)]
    return tuple(Start(mode, pair, arm, position, place) for position, arm in enumerate(order(arms, pair)))
