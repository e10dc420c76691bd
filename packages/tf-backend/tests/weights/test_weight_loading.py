"""Each tensor goes to its place and shard, is checked, and nothing is left out, left over or held on to."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tf_backend.errors import CheckpointError
from tf_backend.plan.schema import WeightRule
from tf_backend.weights.files import StoredTensor
from tf_backend.weights.load import WeightLoader
from torch import nn

RULES = (
    WeightRule("model.embed.weight", "model.embed.weight", None, (6, 4)),
    WeightRule("model.mlp.gate.weight", "model.mlp.gate_up.weight", 0, (3, 4)),
    WeightRule("model.mlp.up.weight", "model.mlp.gate_up.weight", 1, (3, 4)),
)


class Sharded(nn.Parameter):
    """A parameter that is loaded by shard, as merged layers of the engine are."""

    calls: list[tuple[object, ...]]

    def weight_loader(self, parameter: nn.Parameter, tensor: torch.Tensor, *shard: object) -> None:
        assert parameter is self
        self.calls = [*getattr(self, "calls", []), shard]
        start = 0 if not shard else int(str(shard[0])) * tensor.shape[0]
        self.data[start : start + tensor.shape[0]].copy_(tensor)


def targets() -> dict[str, nn.Parameter | torch.Tensor]:
    return {
        "model.embed.weight": nn.Parameter(torch.full((6, 4), float("nan"))),
        "model.mlp.gate_up.weight": Sharded(torch.full((6, 4), float("nan"))),
    }


def tensors(prefix: str = "model.") -> dict[str, torch.Tensor]:
    return {
        f"{prefix}embed.weight": torch.randn(6, 4),
        f"{prefix}mlp.gate.weight": torch.randn(3, 4),
        f"{prefix}mlp.up.weight": torch.randn(3, 4),
    }


def loader(**options: tuple[str, ...]) -> WeightLoader:
    return WeightLoader(RULES, "model", **options)


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_tensors_and_shards_arrive_in_any_order(prefix: str) -> None:
    held, into = tensors(prefix), targets()
    filled = loader().load(reversed(held.items()), into)
    assert filled == set(into)
    assert torch.equal(into["model.embed.weight"], held[f"{prefix}embed.weight"])
    merged = torch.cat([held[f"{prefix}mlp.gate.weight"], held[f"{prefix}mlp.up.weight"]])
    assert torch.equal(into["model.mlp.gate_up.weight"], merged)


def test_a_weight_loader_is_given_the_shard_and_only_where_there_is_one() -> None:
    into = targets()
    whole = Sharded(torch.zeros(6, 4))
    into["model.embed.weight"] = whole
    loader().load(tensors().items(), into)
    assert whole.calls == [()]
    merged = into["model.mlp.gate_up.weight"]
    assert isinstance(merged, Sharded)
    assert merged.calls == [(0,), (1,)]


def test_a_tied_tensor_is_loaded_into_each_of_its_places() -> None:
    rules = (*RULES, WeightRule("model.embed.weight", "lm_head.weight", None, (6, 4)))
    held, into = tensors(), {**targets(), "lm_head.weight": torch.zeros(6, 4)}
    WeightLoader(rules, "model", ignorable=["lm_head.weight"]).load(held.items(), into)
    assert torch.equal(into["lm_head.weight"], held["model.embed.weight"])
    assert torch.equal(into["model.embed.weight"], held["model.embed.weight"])


def test_numbers_are_rounded_to_the_type_of_the_model() -> None:
    held = {name: tensor.double() for name, tensor in tensors().items()}
    into = targets()
    loader().load(held.items(), into)
    assert torch.equal(into["model.embed.weight"], held["model.embed.weight"].float())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int64])
def test_a_quantized_tensor_is_no_number(dtype: torch.dtype) -> None:
    held = {**tensors(), "model.embed.weight": torch.zeros(6, 4, dtype=dtype)}
    with pytest.raises(CheckpointError) as caught:
        loader().load(held.items(), targets())
    assert "model.embed.weight" in str(caught.value)
    assert str(dtype) in str(caught.value)
    assert "quantized" in str(caught.value)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "U8", "I32", "I64", "BOOL"])
def test_a_header_tells_of_a_tensor_that_is_no_number(dtype: str) -> None:
    held = stored(tensors())
    held["model.embed.weight"] = dataclasses.replace(held["model.embed.weight"], dtype=dtype)
    with pytest.raises(CheckpointError, match="cannot be converted without a scale") as caught:
        loader().check(held)
    assert caught.value.tensor == "model.embed.weight"
    assert caught.value.file == "folder/model.safetensors"
    loader(integers=("model.embed.weight",)).check(held)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F7_NEW"])
def test_a_header_with_numbers_of_any_width_passes(dtype: str) -> None:
    loader().check({name: dataclasses.replace(tensor, dtype=dtype) for name, tensor in stored(tensors()).items()})


def test_missing_tensors_are_named() -> None:
    held = tensors()
    del held["model.mlp.up.weight"]
    for check in (lambda: loader().load(held.items(), targets()), lambda: loader().check(stored(held))):
        with pytest.raises(CheckpointError, match=r"lacks 1 of 3 tensors: `model\.mlp\.up\.weight`"):
            check()


def test_many_missing_tensors_are_counted() -> None:
    rules = [WeightRule(f"model.{i}", f"model.{i}", None, (1,)) for i in range(9)]
    with pytest.raises(CheckpointError, match=r"lacks 9 of 9 tensors: .*\.\.\."):
        WeightLoader(rules, "model").check({})


def test_a_tensor_without_a_place() -> None:
    held = {**tensors(), "model.mlp.mystery": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"no place for.*model\.mlp\.mystery"):
        loader().load(held.items(), targets())
    with pytest.raises(CheckpointError, match=r"no place for.*model\.mlp\.mystery.*model\.safetensors"):
        loader().check(stored(held))


def test_a_tensor_of_another_shape() -> None:
    held = {**tensors(), "model.mlp.up.weight": torch.zeros(4, 4)}
    for check in (lambda: loader().load(held.items(), targets()), lambda: loader().check(stored(held))):
        with pytest.raises(CheckpointError) as caught:
            check()
        for word in ("model.mlp.up.weight", "[4, 4]", "[3, 4]"):
            assert word in str(caught.value)


def test_nothing_is_broadcast() -> None:
    held = {**tensors(), "model.embed.weight": torch.zeros(1, 4)}
    with pytest.raises(CheckpointError, match=r"found \[1, 4\]"):
        loader().load(held.items(), targets())


def test_one_tensor_under_two_names() -> None:
    held = {**tensors(), "embed.weight": torch.zeros(6, 4)}
    with pytest.raises(CheckpointError, match=r"two names, `model\.embed\.weight` and `embed\.weight`"):
        loader().load(held.items(), targets())
    with pytest.raises(CheckpointError, match="two names"):
        loader().check(stored(held))


def test_one_parameter_in_two_places_is_filled_once() -> None:
    rules = (*RULES, WeightRule("model.embed.weight", "lm_head.weight", None, (6, 4)))
    shared = Sharded(torch.zeros(6, 4))
    into = {**targets(), "model.embed.weight": shared, "lm_head.weight": shared}
    assert WeightLoader(rules, "model").load(tensors().items(), into) == set(into)
    assert shared.calls == [()]


def test_a_second_checkpoint_may_have_other_names() -> None:
    held, into = tensors(), targets()
    twice = WeightLoader(RULES, "model", tied=TIED, stored=held)
    twice.load(held.items(), into)
    other = tensors("")
    other["lm_head.weight"] = other.pop("embed.weight")
    twice.load(other.items(), into)
    assert torch.equal(into["model.embed.weight"], other["lm_head.weight"])


TIED = {"lm_head.weight": "model.embed.weight"}


def tied_loader(held: dict[str, torch.Tensor], *, known: bool) -> WeightLoader:
    return WeightLoader(RULES, "model", tied=TIED, stored=held if known else None)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("copy", ["before", "after", "alone", "absent"])
def test_a_tied_tensor_is_stored_under_either_name_or_both(copy: str, known: bool) -> None:
    held, into = tensors(), targets()
    embedding = held["model.embed.weight"].clone()
    if copy == "before":
        held = {"lm_head.weight": embedding, **held}
    elif copy == "after":
        held["lm_head.weight"] = embedding
    elif copy == "alone":
        held["lm_head.weight"] = held.pop("model.embed.weight")
    tied_loader(held, known=known).check(stored(held))
    assert tied_loader(held, known=known).load(held.items(), into) == set(into)
    assert torch.equal(into["model.embed.weight"], embedding)


@pytest.mark.parametrize("known", [True, False])
def test_copies_of_a_tied_tensor_that_differ(known: bool) -> None:
    held = {**tensors(), "lm_head.weight": torch.randn(6, 4)}
    with pytest.raises(CheckpointError, match="another value for each") as caught:
        tied_loader(held, known=known).load(held.items(), targets())
    assert '"tie_word_embeddings": false' in str(caught.value)


def test_copies_of_a_tied_tensor_of_other_types_are_compared_as_the_model_holds_them() -> None:
    held = tensors()
    held["lm_head.weight"] = held["model.embed.weight"].double()
    tied_loader(held, known=True).load(held.items(), targets())


def test_a_copy_of_a_tied_tensor_has_its_shape() -> None:
    held = {**tensors(), "lm_head.weight": torch.randn(6, 5)}
    for load in (
        lambda: tied_loader(held, known=True).check(stored(held)),
        lambda: tied_loader(held, known=True).load(held.items(), targets()),
    ):
        with pytest.raises(CheckpointError, match=r"found \[6, 5\], expected \[6, 4\]") as caught:
            load()
        assert "lm_head.weight" in str(caught.value)


def test_one_copy_of_a_tied_tensor_under_two_spellings() -> None:
    held = {**tensors(), "embed.weight": torch.zeros(6, 4)}
    with pytest.raises(CheckpointError, match="two names"):
        tied_loader(held, known=True).load(held.items(), targets())


def test_a_tied_tensor_is_held_only_where_its_copy_is_to_come() -> None:
    held = tensors()
    first = held.pop("model.embed.weight")
    alive = weakref.ref(first)

    def stream(*, known: bool) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal first
        yield "model.embed.weight", first
        del first
        assert (alive() is None) is known
        yield from held.items()

    names = {"model.embed.weight": 0, **held}
    WeightLoader(RULES, "model", tied=TIED, stored=names).load(stream(known=True), targets())


@pytest.mark.parametrize("name", ["model.rotary_emb.inv_freq", "rotary_emb.inv_freq"])
def test_computed_buffers_are_passed_over(name: str) -> None:
    held, into = {name: torch.zeros(99), **tensors()}, targets()
    options = {"ignorable": ("model.rotary_emb.inv_freq",)}
    loader(**options).check(stored(held))
    assert loader(**options).load(held.items(), into) == set(into)


def test_patterns_of_the_transformers_class_are_passed_over() -> None:
    held = {"model.layers.0.attn.masked_bias": torch.zeros(1), **tensors()}
    loader(ignorable_patterns=(r"attn\.masked_bias$",)).load(held.items(), targets())
    with pytest.raises(CheckpointError, match="masked_bias"):
        loader(ignorable_patterns=(r"attn\.bias$",)).load(held.items(), targets())


def test_one_tensor_is_held_at_a_time() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, shape in {"skipped": (1,), **{rule.source: rule.shape for rule in RULES}}.items():
            most = max(most, sum(ref() is not None for ref in alive))
            tensor = torch.zeros(shape)
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    loader(ignorable=("skipped",)).load(stream(), targets())
    assert len(alive) == 4
    assert most == 0


def stored(held: dict[str, torch.Tensor]) -> dict[str, StoredTensor]:
    file = Path("folder/model.safetensors")
    return {name: StoredTensor(name, file, tuple(tensor.shape), "F32") for name, tensor in held.items()}


def test_rows_of_one_tensor_go_to_their_shards_in_another_order() -> None:
    rules = (
        WeightRule("fc.weight", "fc.weight", 0, (6, 4), rows=(3, 6)),
        WeightRule("fc.weight", "fc.weight", 1, (6, 4), rows=(0, 3)),
    )
    held, into = torch.randn(6, 4), Sharded(torch.full((6, 4), float("nan")))
    WeightLoader(rules, "").load([("fc.weight", held)], {"fc.weight": into})
    assert torch.equal(into, torch.cat([held[3:], held[:3]]))
    assert into.calls == [(0,), (1,)]


def test_a_transposed_tensor_is_turned_before_its_rows_are_taken_and_its_bias_is_not() -> None:
    rules = (
        WeightRule("fc.weight", "fc.weight", 0, (4, 6), rows=(0, 2), transposed=True),
        WeightRule("fc.weight", "fc.weight", 1, (4, 6), rows=(2, 4), transposed=True),
        WeightRule("fc.bias", "fc.bias", 0, (6,), rows=(0, 2)),
        WeightRule("fc.bias", "fc.bias", 1, (6,), rows=(2, 4)),
    )
    weight, bias = torch.randn(4, 6), torch.randn(6)
    into = {"fc.weight": Sharded(torch.zeros(4, 4)), "fc.bias": Sharded(torch.zeros(4))}
    WeightLoader(rules, "").load([("fc.weight", weight), ("fc.bias", bias)], into)
    assert torch.equal(into["fc.weight"], weight.t()[:4])
    assert torch.equal(into["fc.bias"], bias[:4])


def test_a_transposed_tensor_without_a_loader_is_copied_turned() -> None:
    into = nn.Parameter(torch.zeros(6, 4))
    held = torch.randn(4, 6)
    WeightLoader([WeightRule("c.weight", "c.weight", None, (4, 6), transposed=True)], "").load(
        [("c.weight", held)], {"c.weight": into}
    )
    assert torch.equal(into, held.t())


def test_the_shape_of_the_whole_tensor_is_checked_not_that_of_its_rows() -> None:
    rules = [WeightRule("fc.weight", "fc.weight", 0, (6, 4), rows=(0, 3))]
    with pytest.raises(CheckpointError, match=r"another shape") as caught:
        WeightLoader(rules, "").load([("fc.weight", torch.randn(3, 4))], {"fc.weight": Sharded(torch.zeros(6, 4))})
    assert "[6, 4]" in str(caught.value)
