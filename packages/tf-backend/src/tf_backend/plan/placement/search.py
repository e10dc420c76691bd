"""Which linears of a module are split: all that read a whole input, or, where that leads nowhere, as few less as will do.

In: the trace of a module. Out: styles, at the least weight that several ranks hold. Where a walk is blocked, one of the linears that led
there must be split into as many pieces as there are key-value heads, or stay whole; candidates are tried in the order of what they cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from fx_match import Trace

from tf_backend.plan.placement.states import Part, Styles, Unplaced
from tf_backend.plan.placement.walk import Blocked, Walk, linear_sizes

_TRIES = 64
"""Walks before a search is given up: a module of the field has two to eight linears."""


def place(
    trace: Trace,
    ranks: int,
    heads: Sequence[tuple[int, int]] = (),
    merged: Mapping[str, tuple[Part, ...]] | None = None,
    is_norm: Callable[[str], bool] = lambda name: False,
    kept: frozenset[str] = frozenset(),
) -> Styles:
    """Split the linears of a module over `ranks`.

    Args:
        trace: of the module's forward, as the model calls it.
        heads: query heads and key-value heads of each call of attention that it makes.
        merged: for each child that a merged layer takes, in whole or in parts, the columns of the parts.
        is_norm: whether the child of that name becomes a root-mean-square norm of ours.
        kept: linears that no layer of the engine takes the place of: whole on every rank.

    Raises:
        Unplaced: with the reason why the first attempt, which splits all it can, leads nowhere.
    """
    if not trace.complete:
        raise Unplaced("its forward could not be followed to the end")
    merged = merged or {}
    numbers = {1, *(kv_heads for _, kv_heads in heads if ranks % kv_heads == 0 and kv_heads < ranks)}
    queue: list[tuple[int, int, _Choice]] = [(0, 0, frozenset())]
    seen: set[_Choice] = {frozenset()}
    first: Unplaced | None = None
    for _ in range(_TRIES):
        if not queue:
            break
        _, _, choice = heapq.heappop(queue)
        fewer = dict(choice)
        try:
            return Walk(trace, ranks, heads, merged, is_norm, fewer, kept).run()
        except Blocked as problem:
            first = first or problem
            for name in sorted(problem.linears - merged.keys()):
                for pieces in numbers - {fewer.get(name)}:
                    more = frozenset({**fewer, name: pieces}.items())
                    if pieces < fewer.get(name, ranks) and more not in seen:
                        seen.add(more)
                        heapq.heappush(queue, (_cost(trace, more, ranks), len(seen), more))
    assert first is not None
    raise first


_Choice = frozenset[tuple[str, int]]


def _cost(trace: Trace, choice: _Choice, ranks: int) -> int:
    """Weight that a rank holds beyond its share."""
    cost = 0
    for name, pieces in choice:
        sizes = linear_sizes(trace.module.get_submodule(name))
        assert sizes is not None
        cost += sizes[0] * sizes[1] // pieces - sizes[0] * sizes[1] // ranks
    return cost
