"""Checkpoint names stand for planned names with the decoder's prefix, without it, or with its inner part."""

from __future__ import annotations

import pytest
import torch
from tf_backend.errors import CheckpointError
from tf_backend.weights.names import planned_name

KNOWN = {"model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("norm.weight", "model.norm.weight"),
        ("layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_full_and_bare_names(name: str, expected: str) -> None:
    assert planned_name(name, KNOWN, "model") == expected


@pytest.mark.parametrize("name", ["model.lm_head.weight", "model.model.norm.weight", "orm.weight", "", "model", "norm"])
def test_other_names_stand_for_nothing(name: str) -> None:
    assert planned_name(name, KNOWN, "model") is None


@pytest.mark.parametrize("name", ["model.decoder.norm.weight", "decoder.norm.weight", "norm.weight"])
def test_nested_prefix(name: str) -> None:
    assert planned_name(name, {"model.decoder.norm.weight"}, "model.decoder") == "model.decoder.norm.weight"


def test_inner_part_alone_is_no_prefix() -> None:
    assert planned_name("model.norm.weight", {"model.decoder.norm.weight"}, "model.decoder") is None


def test_without_a_prefix_names_are_exact() -> None:
    assert planned_name("norm.weight", {"norm.weight"}, "") == "norm.weight"
    assert planned_name("model.norm.weight", {"norm.weight"}, "") is None


def test_names_that_transformers_renames_when_it_loads() -> None:
    from tf_backend.plan.schema import WeightRule
    from tf_backend.weights.load import WeightLoader
    from transformers.core_model_loading import WeightRenaming

    renaming = WeightRenaming(source_patterns=r"^embed_out\.", target_patterns="lm_head.")
    rule = WeightRule("lm_head.weight", "lm_head.weight", None, (4, 2))
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    stored = torch.arange(8.0).view(4, 2)
    loader = WeightLoader([rule], "model", renamings=(renaming,))
    assert loader.load([("embed_out.weight", stored)], {"lm_head.weight": weight}) == {"lm_head.weight"}
    assert torch.equal(weight, stored)
    with pytest.raises(CheckpointError, match="no place for"):
        WeightLoader([rule], "model").load([("embed_out.weight", stored)], {"lm_head.weight": weight})
    with pytest.raises(CheckpointError, match="two names"):
        loader.load([("embed_out.weight", stored), ("lm_head.weight", stored)], {"lm_head.weight": weight})
