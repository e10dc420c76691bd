from __future__ import annotations

import pytest
import torch
from tf_tools.checkpoints import build_model
from tf_tools.mutations import MUTATIONS, Anatomy, Mutation
from tf_tools.mutations._ops import first_operand, replace_op
from tf_tools.mutations._rotation import HALVES, INTERLEAVED, NONE, OTHER, angles_of, pairs_of, rotate, turned_back
from tf_tools.reference import logprobs_of
from torch import nn
from transformers import PreTrainedModel

TOKENS = tuple(range(3, 43))


def eager(name: str) -> PreTrainedModel:
    model = build_model(name)
    model.set_attn_implementation("eager")
    return model


def named(name: str) -> Mutation:
    return next(m for m in MUTATIONS if m.name == name)


@pytest.fixture(scope="module")
def gemma2() -> PreTrainedModel:
    return eager("gemma2")


def test_windows_and_rotations_per_layer() -> None:
    assert [a.window for a in Anatomy.of(eager("qwen2-sliding")).attentions] == [None, 16]
    assert [a.rotation for a in Anatomy.of(eager("smollm3")).attentions] == [HALVES, NONE, HALVES, NONE]


def test_norms_by_what_they_do(gemma2: PreTrainedModel) -> None:
    norms = Anatomy.of(gemma2).norms
    assert {n.offset for n in norms} == {1.0}
    assert [n.name.rpartition(".")[2] for n in norms if n.is_post_norm] == [
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    ] * 2
    qwen3 = Anatomy.of(eager("qwen3")).norms
    assert {n.offset for n in qwen3} == {0.0}
    assert {n.name.rpartition(".")[2] for n in qwen3 if n.in_attention} == {"q_norm", "k_norm"}


def test_residual_adds_of_a_parallel_block_leave_the_sum_of_branches_out() -> None:
    adds = Anatomy.of(eager("phi")).residual_adds
    assert [(a.layer, a.turn, a.residual) for a in adds] == [("model.layers.0", 1, 1), ("model.layers.1", 1, 1)]


def test_interleaved_rotation_is_told_from_halves() -> None:
    assert {a.rotation for a in Anatomy.of(eager("cohere")).attentions} == {INTERLEAVED}


@pytest.mark.parametrize("pairs", [HALVES, INTERLEAVED])
def test_a_rotation_is_recognised_and_undone(pairs: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 7, 16, generator=generator)
    angle = torch.arange(7)[:, None] * torch.tensor([1.0, 0.5, 0.25])
    full = torch.cat((angle, angle), -1) if pairs == HALVES else angle.repeat_interleave(2, -1)
    embeddings = (1.3 * full.cos()[None], 1.3 * full.sin()[None])
    turned = rotate(x, angles_of(embeddings), pairs)
    assert pairs_of(x, turned, embeddings) == pairs
    assert pairs_of(x, x, embeddings) == NONE
    assert pairs_of(x, turned + 1, embeddings) == OTHER
    assert torch.allclose(turned_back(turned, angles_of(embeddings), pairs), x, atol=1e-5)


def test_a_dropped_cap_is_exactly_a_model_without_it(gemma2: PreTrainedModel) -> None:
    plain = eager("gemma2")
    plain.config.final_logit_softcapping = None
    with named("logits.soft-cap").broken(gemma2):
        # What is left of the cap is a division and a product, which round.
        assert torch.allclose(logprobs_of(gemma2, TOKENS), logprobs_of(plain, TOKENS), atol=1e-4)


def test_a_dropped_window_is_exactly_a_model_of_full_layers() -> None:
    sliding, full = eager("mistral"), eager("llama")
    full.load_state_dict(sliding.state_dict())
    with named("window.dropped").broken(sliding):
        assert torch.allclose(logprobs_of(sliding, TOKENS), logprobs_of(full, TOKENS), atol=1e-5)


def test_a_window_off_by_one_is_exactly_a_model_configured_so() -> None:
    sliding = eager("mistral")
    wide = build_model("mistral", overrides={"sliding_window": 17})
    wide.set_attn_implementation("eager")
    with named("window.wide").broken(sliding):
        assert torch.allclose(logprobs_of(sliding, TOKENS), logprobs_of(wide, TOKENS), atol=1e-5)


def test_rotary_added_to_layers_without_is_exactly_a_model_with_it_everywhere() -> None:
    mixed = eager("smollm3")
    everywhere = build_model("smollm3", overrides={"no_rope_layers": [1, 1, 1, 1]})
    everywhere.set_attn_implementation("eager")
    with named("rotary.added-in-layer").broken(mixed):
        assert torch.allclose(logprobs_of(mixed, TOKENS), logprobs_of(everywhere, TOKENS), atol=1e-4)


def test_a_residual_scale_dropped_is_exactly_a_multiplier_of_one() -> None:
    scaled = eager("granite")
    plain = build_model("granite", overrides={"residual_multiplier": 1.0})
    plain.set_attn_implementation("eager")
    with named("residual.scale").broken(scaled):
        assert torch.allclose(logprobs_of(scaled, TOKENS), logprobs_of(plain, TOKENS), atol=1e-4)


def test_experts_without_clamps_are_experts_with_a_far_limit() -> None:
    near = eager("gpt_oss")
    far = build_model("gpt_oss", overrides={"swiglu_limit": 1e6})
    for model in (near, far):
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")
    with named("experts.gate-clamp").broken(near), named("experts.up-clamp").broken(near):
        assert torch.allclose(logprobs_of(near, TOKENS), logprobs_of(far, TOKENS), atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "phi"])
def test_everything_is_undone_even_after_an_error(name: str) -> None:
    model = eager(name)
    before = logprobs_of(model, TOKENS)
    anatomy = Anatomy.of(model)
    for mutation in MUTATIONS:
        if mutation.applies(anatomy):
            with pytest.raises(KeyError), mutation.broken(anatomy):
                raise KeyError
    assert torch.equal(logprobs_of(model, TOKENS), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_site_can_be_broken_twice() -> None:
    model = eager("llama")
    for mutation in MUTATIONS:
        for site in mutation.sites(model)[:1]:
            answers = []
            for _ in range(2):
                with site.broken():
                    answers.append(logprobs_of(model, TOKENS[:5]))
            assert torch.equal(*answers), mutation.name


def test_a_mutation_that_does_not_apply_is_refused() -> None:
    model = eager("llama")
    assert not named("attention.sink").applies(model)
    with pytest.raises(ValueError, match=r"attention\.sink does not apply"), named("attention.sink").broken(model):
        pass


def test_names_are_unique_and_say_what_is_wrong() -> None:
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)
    assert all(m.fault for m in MUTATIONS)


def test_an_operation_is_replaced_by_owner_kind_and_turn() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x) + torch.tanh(x) + self.inner(x)

    model, x = Two(), torch.ones(1)
    tanh = torch.tanh(x)
    with replace_op(model, "", "tanh", first_operand, turn=1):
        assert torch.equal(model(x), tanh + x + tanh)
    with replace_op(model, "inner", "tanh", first_operand):
        assert torch.equal(model(x), tanh + tanh + x)
    with replace_op(model, "", "tanh", first_operand):
        assert torch.equal(model(x), x + x + tanh)
        assert torch.equal(torch.tanh(x), tanh), "calls outside of the model are left alone"
    assert torch.equal(model(x), tanh * 2 + tanh)
