"""Checkpoint names stand for planned names with the decoder's prefix, without it, or with its inner part."""

from __future__ import annotations

import pytest
from tf_backend.weights.conversion import Conversion
from tf_backend.weights.names import Names, Place, natural_order, planned_name
from transformers.core_model_loading import (
    GroupWeightRename,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
)

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


def names_of(*transforms: object, known: tuple[str, ...], base: str = "model") -> Names:
    return Names(Conversion(dict.fromkeys(known, (4, 2)), base, base, transforms))  # type: ignore[arg-type]


def test_a_name_that_transformers_renames() -> None:
    names = names_of(WeightRenaming(r"^embed_out\.", "lm_head."), known=("lm_head.weight",))
    assert names.place("embed_out.weight") == Place("lm_head.weight")
    assert names.place("lm_head.weight") == Place("lm_head.weight")
    assert names.place("embed_in.weight") == Place("embed_in.weight")


def test_a_name_of_the_model_is_renamed_to_another_of_its_names_as_transformers_does() -> None:
    names = names_of(WeightRenaming("up_proj", "gate_proj"), known=("model.up_proj", "model.gate_proj"))
    assert names.place("model.up_proj") == Place("model.gate_proj")


def test_a_name_of_the_model_is_not_renamed_to_one_that_it_lacks() -> None:
    names = names_of(WeightRenaming("up_proj", "gate_proj"), known=("model.up_proj",))
    assert names.place("model.up_proj") == Place("model.up_proj")


def test_a_name_of_the_model_without_its_prefix_is_not_renamed_to_one_that_it_lacks() -> None:
    names = names_of(WeightRenaming("head_norm", "mlp.head_norm"), known=("model.layers.0.mlp.head_norm",))
    for stored in (
        "layers.0.head_norm",
        "model.layers.0.head_norm",
        "layers.0.mlp.head_norm",
        "model.layers.0.mlp.head_norm",
    ):
        assert names.place(stored) == Place("model.layers.0.mlp.head_norm")
    assert names.place("layers.1.head_norm") == Place("layers.1.mlp.head_norm")


def test_a_prefix_that_the_model_lacks_is_taken_away() -> None:
    names = names_of(known=("layers.0.weight",))
    assert names.place("model.layers.0.weight") == Place("layers.0.weight")


def test_a_prefix_is_changed() -> None:
    names = names_of(
        PrefixChange(prefix_to_remove="language_model", model_prefix="model"), known=("model.norm.weight",)
    )
    assert names.place("model.language_model.norm.weight") == Place("model.norm.weight")
    assert names.place("model.norm.weight") == Place("model.norm.weight")


def test_names_that_follow_from_others_are_found_where_all_names_are_known() -> None:
    shift = GroupWeightRename([r"norm0$", r"norm1$"], ["norm1", "norm2"])
    known = {"model.norm1": (1,), "model.norm2": (1,)}
    old = Names(Conversion(known, "model", "model", (shift,)), ["model.norm1", "model.norm0"])
    assert old.place("model.norm1") == Place("model.norm2")
    assert old.place("model.norm0") == Place("model.norm1")
    new = Names(Conversion(known, "model", "model", (shift,)), ["model.norm1", "model.norm2"])
    assert new.place("model.norm1") == Place("model.norm1")


def test_a_converter_is_named_by_its_pattern_and_numbers_are_sorted_as_numbers() -> None:
    stack = WeightConverter("experts.*.w.weight", "experts.w", operations=[MergeModulelist()])
    names = names_of(stack, known=("model.experts.w",))
    assert names.place("experts.10.w.weight") == Place("model.experts.w", "experts.*.w.weight")
    assert natural_order(["e.10.w", "e.9.w"]) == ["e.9.w", "e.10.w"]
