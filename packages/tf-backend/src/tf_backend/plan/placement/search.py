"""Which linears of a module are split: all that read a whole input, or, where that leads nowhere, as few less as will do.

In: the trace of a module. Out: styles, at the least weight that every rank holds whole. Where a walk is blocked, one of the linears that
led there must stay whole; the candidates are tried in the order of what they cost.
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
) -> Styles:
    """Split the linears of a module over `ranks`.

    Args:
        trace: of the module's forward, as the model calls it.
        heads: query heads and key-value heads of each call of attention that it makes.
        merged: for each child that a merged layer takes, in whole or in parts, the columns of the parts.
        is_norm: whether the child of that name becomes a root-mean-square norm of ours.

    Raises:
        Unplaced: with the reason why the first attempt, which splits all it can, leads nowhere.
    """
    if not trace.complete:
        raise Unplaced("its forward could not be followed to the end")
    merged = merged or {}
    queue: list[tuple[int, int, frozenset[str]]] = [(0, 0, frozenset())]
    seen: set[frozenset[str]] = {frozenset()}
    first: Unplaced | None = None
    for _ in range(_TRIES):
        if not queue:
            break
        cost, _, whole = heapq.heappop(queue)
        try:
            return Walk(trace, ranks, heads, merged, is_norm, whole).run()
        except Blocked as problem:
            first = first or problem
            for name in sorted(problem.linears - merged.keys()):
                more = whole | {name}
                if more not in seen:
                    seen.add(more)
                    heapq.heappush(queue, (cost + _weight(trace, name), len(seen), more))
    assert first is not None
    raise first


def _weight(trace: Trace, name: str) -> int:
    sizes = linear_sizes(trace.module.get_submodule(name))
    assert sizes is not None
    return sizes[0] * sizes[1]
