from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tf_tools.bad_inputs import BAD_INPUTS, BadInput
from tf_tools.checkpoints import make_checkpoint
from tf_tools.reference import load_reference
from transformers import AutoConfig

Checkpoint = Callable[[str], Path]


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.mark.parametrize("name", sorted(BAD_INPUTS))
def test_a_copy_is_broken_and_the_good_one_is_not(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    good = checkpoint("llama")
    before = digests(good)
    bad = BAD_INPUTS[name](good, tmp_path / "bad")
    assert digests(good) == before
    assert digests(bad.folder) != before
    assert bad.fault
    assert all(group and all(group) for group in bad.must_say)


@pytest.mark.parametrize("name", sorted(set(BAD_INPUTS) - {"unknown-architecture"}))
def test_the_reference_does_not_load_it(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    bad = BAD_INPUTS[name](checkpoint("llama"), tmp_path / "bad")
    with pytest.raises(Exception, match=r"."):
        load_reference(bad.folder)


def test_an_unknown_architecture_stands_in_the_config(checkpoint: Checkpoint, tmp_path: Path) -> None:
    bad = BAD_INPUTS["unknown-architecture"](checkpoint("llama"), tmp_path / "bad")
    assert AutoConfig.from_pretrained(bad.folder).architectures == ["NoSuchForCausalLM"]
    assert bad.must_say == (("NoSuchForCausalLM",),)


@pytest.mark.parametrize("name", ["missing-shard", "truncated-shard", "index-lies"])
def test_only_the_fault_is_wrong_with_a_sharded_copy(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    bad = BAD_INPUTS[name](checkpoint("llama"), tmp_path / "bad").folder
    index = json.loads((bad / "model.safetensors.index.json").read_text())
    assert len(index["weight_map"]) == 21
    assert len(set(index["weight_map"].values())) == 2


def test_a_sharded_good_checkpoint_will_do_as_well(tmp_path: Path) -> None:
    good = make_checkpoint("llama", tmp_path / "good", max_shard_size="200KB")
    bad = BAD_INPUTS["wrong-shape"](good, tmp_path / "bad")
    assert [p.name for p in bad.folder.glob("*.safetensors*")] == ["model.safetensors"]
    shapes = bad.must_say[1:]
    assert bad.must_say[0] == ("model.layers.0.mlp.down_proj.weight",)
    assert [s[0] for s in shapes] == ["[128, 192]", "[129, 192]"]


def test_what_an_error_must_say() -> None:
    bad = BadInput(Path("x"), "for the test", (("a.weight",), ("[2, 3]", "(2, 3)")))
    assert bad.unsaid("a.weight is (2, 3), expected [4, 3]") == []
    assert bad.unsaid("a.weight is wrong") == ["[2, 3]"]
    assert bad.unsaid("") == ["a.weight", "[2, 3]"]
