"""Which keys a query sees is read from transformers' own mask functions, by evaluating them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tf_backend.plan.masks import MaskKind, classify
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

LONGEST = 16_384
Mask = Callable[..., Any]


def test_causal() -> None:
    assert classify(causal_mask_function, longest=LONGEST) == MaskKind("full")
    assert str(classify(causal_mask_function, longest=LONGEST)) == "full"


@pytest.mark.parametrize("window", [1, 2, 3, 16, 17, 255, 1024, 4096, 8191])
def test_a_sliding_window_counts_the_query_itself(window: int) -> None:
    found = classify(sliding_window_causal_mask_function(window), longest=LONGEST)
    assert found == MaskKind("sliding", window)
    assert str(found) == f"sliding({window})"


@pytest.mark.parametrize("chunk", [2, 16, 100, 1024, 4096, 8192])
def test_chunks(chunk: int) -> None:
    mask = chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int))
    assert classify(mask, longest=LONGEST) == MaskKind("chunked", chunk)


def test_a_window_that_no_prompt_reaches_is_no_window() -> None:
    assert classify(sliding_window_causal_mask_function(4096), longest=2048) == MaskKind("full")
    assert classify(sliding_window_causal_mask_function(2047), longest=2048) == MaskKind("sliding", 2047)


def test_a_window_that_only_the_last_position_shows() -> None:
    assert classify(sliding_window_causal_mask_function(599_999), longest=600_000) == MaskKind("sliding", 599_999)


def test_bidirectional() -> None:
    assert classify(bidirectional_mask_function, longest=LONGEST) == MaskKind("bidirectional")


def prefix(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key < 5


def document(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query // 10 == key // 10


def every_second(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query - key) % 2 == 0


def first_key(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key == 0


def not_itself(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key < query


def growing(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key > query // 2


def nothing(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key < 0


@pytest.mark.parametrize(
    "mask",
    [
        or_masks(causal_mask_function, prefix),
        sliding_window_bidirectional_mask_function(16),
        and_masks(causal_mask_function, every_second),
        or_masks(sliding_window_causal_mask_function(4), first_key),
        and_masks(causal_mask_function, not_itself),
        and_masks(causal_mask_function, growing),
        document,
        nothing,
    ],
    ids=[
        "prefix",
        "window both ways",
        "dilated",
        "attention sink",
        "not itself",
        "growing",
        "documents both ways",
        "nothing",
    ],
)
def test_other_masks_are_unknown_with_a_reason(mask: Mask) -> None:
    found = classify(mask, longest=LONGEST)
    assert found.kind == "unknown"
    assert found.size is None
    assert "key" in found.reason


def test_causal_within_documents_is_no_chunk_when_documents_differ() -> None:
    ends = torch.tensor([7, 29, 31, 1000, 5000])

    def packed(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return torch.bucketize(query, ends) == torch.bucketize(key, ends)

    assert classify(and_masks(causal_mask_function, packed), longest=LONGEST).kind == "unknown"


def test_a_mask_that_needs_data_is_unknown_and_says_why() -> None:
    padding = torch.zeros(1, dtype=torch.int, device="meta")
    found = classify(chunked_causal_mask_function(16, padding), longest=LONGEST)
    assert found.kind == "unknown"
    assert "cannot be evaluated" in found.reason


def test_a_mask_that_raises_is_unknown_and_does_not_raise() -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("by the mask")

    assert "ZeroDivisionError: by the mask" in classify(broken, longest=LONGEST).reason


def test_every_position_of_a_short_context_is_right() -> None:
    """What is called a window is one at each position, not only at those that were looked at."""
    for window in range(1, 40):
        kind = classify(sliding_window_causal_mask_function(window), longest=40)
        expected = MaskKind("sliding", window) if window < 40 else MaskKind("full")
        assert kind == expected
