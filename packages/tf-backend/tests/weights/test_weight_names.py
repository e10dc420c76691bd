"""Checkpoint names stand for planned names with the decoder's prefix, without it, or with its inner part."""

from __future__ import annotations

import pytest
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
