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
    queries = sorted({*(q for q in _PROBED_QUERIES if q < longest), max(longest - 1, 0)})
    starts: list[tuple[int, int]] = []
    try:
        with torch.device("cpu"):
            for query in queries:
                seen = _row(mask_function, query)
                if bool(seen[query + 1 :].any()):
                    if bool(seen.all()):
                        return (
                            MaskKind("bidirectional")
                            if query == queries[0] and _is_all(mask_function)
                            else _unknown(query)
                        )
                    return _unknown(query)
                past = seen[: query + 1]
                if not bool(past[query]):
                    return _unknown(query)
                start = int(past.to(torch.int8).argmax())
                if not bool(past[start:].all()):
                    return _unknown(query)
                starts.append((query, start))
    except Exception as error:  # any failure of foreign code is the same answer: not known
        return MaskKind("unknown", reason=f"its mask function cannot be evaluated: {type(error).__name__}: {error}")
    return _name(starts)


def _row(mask_function: Callable[..., Any], query: int) -> torch.Tensor:
    """Which of the keys 0 .. query + _BEYOND the query sees; shape [keys], bool."""
    keys = torch.arange(query + 1 + _BEYOND)
    zero = torch.zeros((), dtype=torch.long)
    seen = mask_function(zero, zero, torch.tensor(query), keys)
    return torch.as_tensor(seen).expand(keys.shape).bool()


def _is_all(mask_function: Callable[..., Any]) -> bool:
    return all(bool(_row(mask_function, query).all()) for query in (0, 17, 1024))


def _unknown(query: int) -> MaskKind:
    return MaskKind("unknown", reason=f"the keys that a query at position {query} sees are not one run that ends at it")


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
