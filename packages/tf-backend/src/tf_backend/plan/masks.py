"""Which keys a query sees, read from transformers' mask function by evaluating it.

In: the `mask_function(batch, head, query, key)` that `transformers.masking_utils` composes. Out: a `MaskKind`.
The names of layer types are not looked at: a function that shows a query its last 16 keys is a window of 16, whatever it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

_PROBED_QUERIES = (0, 1, 2, 3, 5, 15, 16, 17, 64, 129, 1000, 1023, 1024, 4097, 8191, 32769, 131_071, 262_145)
_BEYOND = 8


@dataclass(frozen=True, slots=True)
class MaskKind:
    """What a mask lets a query at position ``q`` see.

    full: keys 0..q. sliding: the last `size` keys, q included. chunked: keys of q's own chunk of `size` up to q.
    bidirectional: all keys. unknown: none of these, with the reason.
    """

    kind: Literal["full", "sliding", "chunked", "bidirectional", "unknown"]
    size: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        return self.kind if self.size is None else f"{self.kind}({self.size})"


def classify(mask_function: Callable[..., Any], *, longest: int) -> MaskKind:
    """Evaluate `mask_function` at probe positions up to `longest` tokens and say what it is.

    Never raises: a function that cannot be evaluated is unknown, with the reason.
    """
    probed = {*(q for q in _PROBED_QUERIES if q < longest), max(longest - 1, 0)}
    try:
        with torch.device("cpu"):
            starts = {query: _start(mask_function, query) for query in sorted(probed)}
            for query in _around_the_edge(mask_function, starts, longest):
                starts[query] = _start(mask_function, query)
            return _name(sorted(starts.items()))
    except _NotOneRun as problem:
        if problem.query == 0 and _is_all(mask_function):
            return MaskKind("bidirectional")
        return MaskKind("unknown", reason=str(problem))
    except Exception as error:  # any failure of foreign code is the same answer: not known
        return MaskKind("unknown", reason=f"its mask function cannot be evaluated: {type(error).__name__}: {error}")


class _NotOneRun(Exception):
    def __init__(self, query: int) -> None:
        super().__init__(f"the keys that a query at position {query} sees are not one run that ends at it")
        self.query = query


def _start(mask_function: Callable[..., Any], query: int) -> int:
    """First key that the query sees, where it sees all from there to itself and none after."""
    seen = _row(mask_function, query)
    start = int(seen.to(torch.int8).argmax())
    if not bool(seen[start : query + 1].all()) or not bool(seen[query]) or bool(seen[query + 1 :].any()):
        raise _NotOneRun(query)
    return start


def _around_the_edge(mask_function: Callable[..., Any], starts: dict[int, int], longest: int) -> set[int]:
    """The first query that does not see key 0, found by bisection, its neighbours, and the places where a chunk of that size would end.

    A window and a chunk of one size agree at the last query of each chunk, and nowhere else.
    """
    limited = [query for query, start in starts.items() if start > 0]
    if not limited:
        return set()
    low, high = max((query for query in starts if query < limited[0]), default=-1), limited[0]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _start(mask_function, middle) > 0 else (middle, high)
    near = {high - 1, high, high + 1, high + high // 2, 2 * high - 1, 2 * high, 2 * high + 1, 5 * high + 3}
    return {query for query in near if 0 <= query < longest}


def _row(mask_function: Callable[..., Any], query: int) -> torch.Tensor:
    """Which of the keys 0 .. query + _BEYOND the query sees; shape [keys], bool."""
    keys = torch.arange(query + 1 + _BEYOND)
    zero = torch.zeros((), dtype=torch.long)
    seen = mask_function(zero, zero, torch.tensor(query), keys)
    return torch.as_tensor(seen).expand(keys.shape).bool()


def _is_all(mask_function: Callable[..., Any]) -> bool:
    return all(bool(_row(mask_function, query).all()) for query in (0, 17, 1024))


def _name(starts: list[tuple[int, int]]) -> MaskKind:
    limited = [(query, start) for query, start in starts if start > 0]
    if not limited:
        return MaskKind("full")
    first_query, first_start = limited[0]
    window = first_query - first_start + 1
    if all(start == max(0, query - window + 1) for query, start in starts):
        return MaskKind("sliding", window)
    for chunk in _chunk_candidates(limited):
        if all(start == query // chunk * chunk for query, start in starts):
            return MaskKind("chunked", chunk)
    return MaskKind(
        "unknown", reason="its first visible key is neither a fixed distance behind the query nor the start of a chunk"
    )


def _chunk_candidates(limited: list[tuple[int, int]]) -> list[int]:
    """Divisors of the first chunk start that is seen, largest first."""
    start = min(start for _, start in limited)
    return sorted({d for i in range(1, int(start**0.5) + 1) if start % i == 0 for d in (i, start // i)}, reverse=True)
