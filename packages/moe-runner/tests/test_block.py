"""The description: every fact that is known, and what is not known said as such."""

from __future__ import annotations

import dataclasses

import pytest
from moe_runner import SparseBlock

BLOCK = SparseBlock(
    experts="experts",
    num_experts=8,
    storage="stacked parameters",
    parameters=("experts.up", "experts.down"),
    top_k=2,
    score="sigmoid",
    score_order="before",
    shared_experts=None,
    returns_router_logits=False,
    called=True,
    evidence=(),
)


def described(**changes: object) -> str:
    return dataclasses.replace(BLOCK, **changes).describe()  # type: ignore[arg-type]


def test_what_is_known_is_said() -> None:
    assert described() == "8 experts, top 2, sigmoid before top-k, experts as stacked parameters `experts.up`"
    assert described(shared_experts="shared", returns_router_logits=True).endswith(
        "`experts.up`, shared experts `shared`, returns its router logits"
    )
    assert described(storage="module list").endswith("experts as module list `experts`")
    assert described(storage="module list", experts="").endswith("experts as module list")


def test_what_is_not_known_is_said_too() -> None:
    assert "top-k not known, score function not known" in described(top_k=None, score=None, score_order=None)
    assert described(called=False, top_k=None, score=None).startswith("8 experts, never called, so how tokens")


def test_a_block_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BLOCK.top_k = 3  # type: ignore[misc]
