"""Parts of a converted tensor are gathered, put together once by transformers' own operations, and let go."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tf_backend.errors import CheckpointError
from tf_backend.plan.schema import WeightRule
from tf_backend.weights.conversion import Conversion
from tf_backend.weights.files import StoredTensor
from tf_backend.weights.load import WeightLoader
from tf_backend.weights.names import Names
from tf_backend.weights.stream import converted
from torch import nn
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

Tensors = dict[str, torch.Tensor]

GATE_UP, DOWN = "model.layers.{}.mlp.experts.gate_up_proj", "model.layers.{}.mlp.experts.down_proj"
SHAPES = {
    "model.norm.weight": (4,),
    **{GATE_UP.format(layer): (3, 4, 5) for layer in range(2)},
    **{DOWN.format(layer): (3, 5, 2) for layer in range(2)},
}
TRANSFORMS = (
    WeightRenaming(".sparse.", ".mlp."),
    WeightConverter(
        [".experts.*.w1.weight", ".experts.*.w3.weight"],
        ".experts.gate_up_proj",
        operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
    ),
    WeightConverter(".experts.*.w2.weight", ".experts.down_proj", operations=[MergeModulelist(dim=0)]),
)
EXPERTS = Conversion(SHAPES, "model", "model", TRANSFORMS)
PART_SHAPES = {"w1": (2, 5), "w2": (5, 2), "w3": (2, 5)}


def experts(prefix: str = "model.") -> Tensors:
    """As stored: sorted by name, as `save_pretrained` and vLLM's loader have them."""
    held = {
        f"{prefix}layers.{layer}.sparse.experts.{expert}.{part}.weight": torch.randn(shape)
        for layer in range(2)
        for expert in range(3)
        for part, shape in PART_SHAPES.items()
    }
    return {**held, f"{prefix}norm.weight": torch.randn(4)}


def in_memory(held: Tensors, prefix: str = "model.") -> Tensors:
    found = {"model.norm.weight": held[f"{prefix}norm.weight"]}
    for layer in range(2):
        part = {
            name: [held[f"{prefix}layers.{layer}.sparse.experts.{expert}.{name}.weight"] for expert in range(3)]
            for name in PART_SHAPES
        }
        found[GATE_UP.format(layer)] = torch.cat([torch.stack(part["w1"]), torch.stack(part["w3"])], 1)
        found[DOWN.format(layer)] = torch.stack(part["w2"])
    return found


def names(held: Tensors, *, known: bool, conversion: Conversion = EXPERTS) -> Names:
    return Names(conversion, held if known else None)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize("order", [list, lambda items: list(reversed(items))], ids=["as stored", "backwards"])
def test_experts_are_stacked_whatever_their_order(
    known: bool, prefix: str, order: Callable[[list[tuple[str, torch.Tensor]]], list[tuple[str, torch.Tensor]]]
) -> None:
    held = experts(prefix)
    back = {name: tensor for _, name, tensor in converted(order(list(held.items())), names(held, known=known))}
    expected = in_memory(held, prefix)
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], expected[name]) for name in expected)


@pytest.mark.parametrize("known", [True, False])
def test_the_parts_of_one_layer_are_held_and_nothing_else(known: bool) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    held = experts()
    reading = names(held, known=known)
    most = 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name in list(held):
            most = max(most, sum(ref() is not None for ref in alive))
            tensor = held.pop(name)
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    for _, _, tensor in converted(stream(), reading):
        del tensor
    assert most == 7  # of the nine parts of a layer; the eighth completes `down_proj`, whose three are let go
    assert sum(ref() is not None for ref in alive) == 0


def test_types_are_kept() -> None:
    held = {name: tensor.bfloat16() for name, tensor in experts().items()}
    assert {tensor.dtype for _, _, tensor in converted(held.items(), names(held, known=True))} == {torch.bfloat16}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize("spelling", [".sparse.", ".mlp."])
def test_missing_parts_are_named(known: bool, prefix: str, spelling: str) -> None:
    held = {name.replace(".sparse.", spelling): tensor for name, tensor in experts(prefix).items()}
    del held[f"{prefix}layers.1{spelling}experts.1.w3.weight"]
    with pytest.raises(CheckpointError) as caught:
        list(converted(held.items(), names(held, known=known)))
    assert f"lacks 1 of the 6 tensors that make `{GATE_UP.format(1)}`" in str(caught.value)
    assert "`model.layers.1.sparse.experts.1.w3.weight`" in str(caught.value)


@pytest.mark.parametrize("known", [True, False])
def test_more_experts_than_the_config_has(known: bool) -> None:
    held = {**experts(), "model.layers.0.sparse.experts.3.w2.weight": torch.randn(5, 2)}
    with pytest.raises(
        CheckpointError, match=r"down_proj` (have other shapes, or are others in number,|than the)|more parts"
    ):
        list(converted(held.items(), names(held, known=known)))


@pytest.mark.parametrize("known", [True, False])
def test_a_part_of_another_shape(known: bool) -> None:
    held = {**experts(), "model.layers.0.sparse.experts.1.w2.weight": torch.randn(5, 3)}
    with pytest.raises(CheckpointError, match=r"cannot be put together by transformers' MergeModulelist") as caught:
        list(converted(held.items(), names(held, known=known)))
    assert DOWN.format(0) in str(caught.value)
    assert "model.layers.0.sparse.experts.0.w2.weight and 2 more" in str(caught.value)


def test_parts_that_are_all_of_another_shape() -> None:
    held = {name: torch.randn(6, 2) if ".w2." in name else tensor for name, tensor in experts().items()}
    with pytest.raises(CheckpointError, match=r"found \[3, 6, 2\], expected \[3, 5, 2\]"):
        list(converted(held.items(), names(held, known=True)))


def test_one_part_under_two_spellings() -> None:
    held = experts()
    held["model.layers.0.mlp.experts.1.w2.weight"] = held["model.layers.0.sparse.experts.1.w2.weight"]
    with pytest.raises(CheckpointError, match=r"down_proj`"):
        list(converted(held.items(), names(held, known=True)))


def test_one_stored_tensor_for_several_of_the_model() -> None:
    split = WeightConverter("qkv.weight", ["q.weight", "k.weight", "v.weight"], operations=[Chunk(dim=0)])
    conversion = Conversion(dict.fromkeys(("a.q.weight", "a.k.weight", "a.v.weight"), (2, 3)), transforms=(split,))
    stored = torch.randn(6, 3)
    made = {name: tensor for _, name, tensor in converted([("a.qkv.weight", stored)], Names(conversion))}
    assert [name.split(".")[1] for name in made] == ["q", "k", "v"]
    assert torch.equal(torch.cat(list(made.values())), stored)


def test_values_may_change_under_their_name() -> None:
    turned = WeightConverter("up.weight", "up.weight", operations=[Transpose(0, 1)])
    stored = torch.randn(3, 2)
    ((_, name, tensor),) = converted(
        [("up.weight", stored)], Names(Conversion({"up.weight": (2, 3)}, transforms=(turned,)))
    )
    assert name == "up.weight"
    assert torch.equal(tensor, stored.t())


def test_a_conversion_that_cannot_be_reversed_waits_for_the_end() -> None:
    class OneWay(MergeModulelist):
        @property
        def reverse_op(self) -> MergeModulelist:
            raise NotImplementedError

    one_way = WeightConverter(".experts.*.w.weight", ".experts.w", operations=[OneWay(dim=0)])
    conversion = Conversion({"model.experts.w": (2, 3)}, "model", "model", (one_way,))
    held = {f"model.experts.{index}.w.weight": torch.randn(3) for index in (1, 0)}
    for known in (True, False):
        ((_, _, tensor),) = converted(held.items(), names(held, known=known, conversion=conversion))
        assert torch.equal(tensor, torch.stack([held["model.experts.0.w.weight"], held["model.experts.1.w.weight"]]))


RULES = [WeightRule(name, name, None, shape) for name, shape in SHAPES.items()]


def headers(held: Tensors) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(name, Path("model.safetensors"), tuple(tensor.shape), "F32") for name, tensor in held.items()
    }


def test_headers_are_held_against_the_rules_through_the_operations() -> None:
    held = experts()
    WeightLoader(RULES, "model", conversion=EXPERTS).check(headers(held))
    with pytest.raises(CheckpointError, match=r"found \[3, 6, 2\], expected \[3, 5, 2\]"):
        WeightLoader(RULES, "model", conversion=EXPERTS).check(
            headers({name: torch.randn(6, 2) if ".w2." in name else tensor for name, tensor in held.items()})
        )
    lacking = {name: tensor for name, tensor in held.items() if "layers.1.sparse.experts.2" not in name}
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 3 tensors that make") as caught:
        WeightLoader(RULES, "model", conversion=EXPERTS).check(headers(lacking))
    assert "`model.layers.1.sparse.experts.2.w2.weight`" in str(caught.value)


def test_a_tensor_without_any_part_is_told_with_the_names_of_its_parts() -> None:
    held = {name: tensor for name, tensor in experts().items() if "layers.1" not in name or ".w2." not in name}
    with pytest.raises(CheckpointError) as caught:
        WeightLoader(RULES, "model", conversion=EXPERTS).check(headers(held))
    assert f"lacks 1 of 5 tensors: `{DOWN.format(1)}` (stored as `model.layers.1.sparse.experts.0.w2.weight`" in str(
        caught.value
    )


@pytest.mark.parametrize("layout", ["of the checkpoint", "of the model"])
def test_experts_are_loaded_from_either_layout(layout: str) -> None:
    held = experts()
    expected = in_memory(held)
    into = {name: nn.Parameter(torch.full(shape, float("nan"))) for name, shape in SHAPES.items()}
    loader = WeightLoader(RULES, "model", conversion=EXPERTS)
    given = held if layout == "of the checkpoint" else expected
    loader.check(headers(given))
    assert loader.load(given.items(), into) == set(SHAPES)
    assert all(torch.equal(into[name], expected[name]) for name in SHAPES)


def test_experts_in_both_layouts_are_one_tensor_under_two_names() -> None:
    held = experts()
    both = {**held, DOWN.format(0): in_memory(held)[DOWN.format(0)]}
    with pytest.raises(CheckpointError, match="two names"):
        WeightLoader(RULES, "model", conversion=EXPERTS).check(headers(both))
