from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tf_tools.checkpoints import INDEX, RECIPES, CheckpointError, Draw, build_model, make_checkpoint, scale_weights
from tf_tools.reference import ReferenceError, load_reference, logprobs_of

TOKENS = (5, 9, 300, 17)


def test_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (make_checkpoint("llama", tmp_path / n, seed=3) for n in ("a", "b"))
    names = sorted(p.name for p in first.iterdir())
    assert names == sorted(p.name for p in second.iterdir())
    assert all((first / n).read_bytes() == (second / n).read_bytes() for n in names)


def test_another_seed_gives_other_weights() -> None:
    one, other = build_model("llama", seed=0), build_model("llama", seed=1)
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(not torch.equal(a, b) for a, b in pairs)


def test_a_draw_depends_on_the_name_and_not_on_the_order_of_modules() -> None:
    class AB(torch.nn.Module):
        def __init__(self, order: str) -> None:
            super().__init__()
            for name in order:
                setattr(self, name, torch.nn.Linear(4, 4))

    ab, ba = AB("ab"), AB("ba")
    torch.manual_seed(0)
    for module in (ab, ba):
        for linear in module.children():
            torch.nn.init.zeros_(linear.bias)
        scale_weights(module, seed=0)
    assert torch.equal(ab.a.weight, ba.a.weight)
    assert torch.equal(ab.b.bias, ba.b.bias)


def test_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    build_model("llama")
    assert torch.equal(torch.rand(3), expected)


def test_every_parameter_matters_by_its_size() -> None:
    for name, parameter in build_model("qwen2").named_parameters():
        spread = parameter.detach().std()
        assert 0.1 < spread < 0.35, name


def test_zeros_that_a_checkpoint_holds_are_drawn() -> None:
    module = torch.nn.BatchNorm1d(64)
    module.register_buffer("unsaved", torch.zeros(64), persistent=False)
    scale_weights(module, seed=0)
    assert module.running_mean is not None
    assert module.running_var is not None
    assert 0.1 < float(module.running_mean.std()) < 0.5
    assert torch.equal(module.running_var, torch.ones(64))
    assert not module.get_buffer("unsaved").any()


def test_a_draw_replaces_the_default_scale_and_shifts() -> None:
    module = torch.nn.Linear(64, 64)
    scale_weights(module, seed=0, draws=(Draw("^weight$", 0.01, "for the test", shift=2.0),))
    assert abs(float(module.weight.detach().mean()) - 2.0) < 0.01
    assert float(module.bias.detach().std()) > 0.1


def test_recurrent_parameters_are_left_as_initialised() -> None:
    module = torch.nn.Module()
    module.A_log = torch.nn.Parameter(torch.ones(4))
    scale_weights(module, seed=0)
    assert torch.equal(module.A_log.detach(), torch.ones(4))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_saves_and_loads_to_the_same_function(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path / name)
    built, loaded = build_model(name), load_reference(folder)
    built.set_attn_implementation("eager")
    assert torch.allclose(logprobs_of(built, TOKENS), logprobs_of(loaded, TOKENS), atol=1e-4)


def test_shards_and_index(tmp_path: Path) -> None:
    whole = make_checkpoint("llama", tmp_path / "whole")
    shards = make_checkpoint("llama", tmp_path / "shards", max_shard_size="200KB")
    index = json.loads((shards / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert torch.equal(logprobs_of(load_reference(whole), TOKENS), logprobs_of(load_reference(shards), TOKENS))


@pytest.mark.parametrize("size", ["5GB", "200KB"])
def test_base_prefix_dropped(size: str, tmp_path: Path) -> None:
    whole = make_checkpoint("llama", tmp_path / "whole")
    bare = make_checkpoint("llama", tmp_path / "bare", drop_base_prefix=True, max_shard_size=size)
    names = {n for p in bare.glob("*.safetensors") for n in load_file(p)}
    assert "layers.0.self_attn.q_proj.weight" in names
    assert not any(n.startswith("model.") for n in names)
    if size != "5GB":
        assert set(json.loads((bare / INDEX).read_text())["weight_map"]) == names
    assert torch.equal(logprobs_of(load_reference(whole), TOKENS), logprobs_of(load_reference(bare), TOKENS))


def test_overrides_and_dtype(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "x", overrides={"num_hidden_layers": 1}, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert not any("layers.1." in n for n in tensors)


def test_any_model_type_can_be_made(tmp_path: Path) -> None:
    folder = make_checkpoint("olmo2", tmp_path / "olmo2")
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 128


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no_such_type.*gemma2"):
        make_checkpoint("no_such_type", tmp_path / "x")


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="not empty"):
        make_checkpoint("llama", tmp_path)


def test_the_reference_refuses_a_checkpoint_with_a_weight_missing(tmp_path: Path) -> None:
    folder = make_checkpoint("llama-biased", tmp_path / "x")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "mlp_bias": False}))
    with pytest.raises(ReferenceError, match=r"gate_proj\.bias"):
        load_reference(folder)
