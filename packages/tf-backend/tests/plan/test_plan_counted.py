"""Counts of tokens that a rewritten forward takes from the engine are no mixing; what stays in the same line is."""

from __future__ import annotations

import inspect

import pytest
import torch
from tf_backend.plan.counted import take_counts
from tf_backend.plan.mixing import Mixing
from tf_backend.plan.observe import ModuleCall, Observation
from tf_backend.plan.schema import Place
from tf_backend.plan.variants import VariantTable
from torch import nn
from vllm_layers_bridge import FUSIONS

X = torch.empty(1, 7, 8, device="meta")


class Counting(nn.Module):
    def forward(self, x):
        return x * torch.arange(x.shape[1])[:, None]


class CountingTwice(nn.Module):
    def forward(self, x):
        return x * torch.arange(x.shape[1])[:, None] - x * torch.arange(1, x.shape[1] + 1)[:, None]


def taken(cls: type[nn.Module], **changes: object) -> list[Mixing]:
    """What is taken of one count in the only statement of the forward."""
    lines, first = inspect.getsourcelines(cls.forward)
    place = Place(**{"module": cls.__module__, "line": first + 1, "text": lines[1].strip(), **changes})
    mixing = Mixing("arange", "counting", "it counts tokens", place)
    seen = Observation(7, calls={"counting": ModuleCall((X,), {})}, mixing=[mixing])
    found = take_counts(nn.ModuleDict({"counting": cls()}), seen, VariantTable(FUSIONS))
    assert found + seen.mixing == [mixing]
    return found


def test_a_count_that_is_rewritten() -> None:
    assert len(taken(Counting)) == 1


@pytest.mark.parametrize("changes", [{"line": 1, "text": '"""'}, {"text": "at = torch.arange(length)"}])
def test_a_count_elsewhere(changes: dict[str, object]) -> None:
    """In another line, or in a line of another file that has the same number."""
    assert taken(Counting, **changes) == []


def test_a_count_that_stays_in_the_line_of_one_that_is_rewritten() -> None:
    assert taken(CountingTwice) == []
