"""Tables looked up by position: how far they reach, offsets and clamps included, and that nothing longer is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tf_backend.plan.observe import observe
from tf_backend.plan.position_rows import PositionFollower
from tf_backend.plan.positions import position_refusals
from tf_backend.plan.schema import PositionRows
from torch import nn
from transformers import PreTrainedModel

Models = Callable[..., PreTrainedModel]


@pytest.mark.parametrize(
    ("name", "overrides", "module", "rows", "end"),
    [
        ("gpt2", {"n_embd": 128, "n_head": 4, "n_positions": 256}, "transformer.wpe", 256, 256),
        ("opt", {}, "model.decoder.embed_positions", 258, 256),
        ("biogpt", {}, "biogpt.embed_positions", 258, 256),
    ],
)
def test_learned_positions(
    name: str, overrides: dict[str, Any], module: str, rows: int, end: int, model_of: Models
) -> None:
    assert observe(model_of(name, **overrides)).position_rows == (PositionRows(module, rows, end),)


@pytest.mark.parametrize("name", ["llama", "phi", "gemma2"])
def test_models_without(name: str, model_of: Models) -> None:
    assert observe(model_of(name)).position_rows == ()


def test_a_longest_sequence_beyond(model_of: Models, planned: Callable[..., Any]) -> None:
    plan = planned(model_of("opt")).plan
    assert plan.is_served
    assert list(position_refusals(plan, 256)) == []
    (refusal,) = position_refusals(plan, 257)
    assert "`model.decoder.embed_positions` looks up a table of 258 rows by position" in refusal.reason
    assert "up to 257" in refusal.reason
    assert "--max-model-len 256" in refusal.remedy


def found_by(look_up: Callable[[torch.Tensor, torch.Tensor], Any], rows: int = 20) -> tuple[int, ...]:
    positions = torch.zeros((1, 37), dtype=torch.long, device="meta")
    follower = PositionFollower(positions, lambda: "table")
    with follower:
        look_up(torch.empty(rows, 4, device="meta"), positions)
    return tuple(found.end for found in follower.found.values())


@pytest.mark.parametrize(
    ("look_up", "end"),
    [
        (lambda table, at: nn.functional.embedding(at, table), (20,)),
        (lambda table, at: nn.functional.embedding(at + 3, table), (17,)),
        (lambda table, at: nn.functional.embedding((at.int() + 3).to(torch.long), table), (17,)),
        (lambda table, at: table[at + 1], (19,)),
        (lambda table, at: nn.functional.embedding(at * 2, table), (10,)),
        (lambda table, at: nn.functional.embedding(at.clamp(max=19), table), ()),
        (lambda table, at: nn.functional.embedding(at.clamp(max=20), table), (20,)),
        (lambda table, at: nn.functional.embedding(at % 20, table), ()),
        (lambda table, at: nn.functional.embedding(torch.zeros_like(at), table), ()),
        (lambda table, at: nn.functional.embedding(torch.zeros(1, 37, dtype=torch.long, device="meta"), table), ()),
    ],
)
def test_offsets_and_clamps(look_up: Callable[..., Any], end: tuple[int, ...]) -> None:
    assert found_by(look_up) == end
