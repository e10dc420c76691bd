"""A sample of transformers' causal language models: planning never raises, says the same twice, and serves or refuses for known reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tf_backend.plan import variants
from tf_backend.plan.planner import Planned
from tf_backend.plan.schema import Plan
from transformers import PreTrainedModel

# Model type -> overrides, and a word of the first reason; None where the model is served.
SAMPLE: dict[str, tuple[dict[str, Any], str | None]] = {
    "apertus": ({}, None),
    "cohere": ({}, None),
    "gemma3_text": ({"head_dim": 32}, None),
    "glm4": ({"head_dim": 32, "pad_token_id": 0}, None),
    "gpt2": ({}, None),
    "gpt_neox": ({}, None),
    "olmo2": ({}, None),
    "opt": ({"ffn_dim": 192, "word_embed_proj_dim": 128}, None),
    "phi3": ({}, None),
    "stablelm": ({}, None),
    "bamba": ({"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_expand": 2}, "convolution"),
    "falcon": ({}, "_softmax"),
    "gpt_neo": ({"num_layers": 2, "attention_types": [[["global", "local"], 1]]}, "mixes tokens"),
    "minicpm3": ({"kv_lora_rank": 64, "q_lora_rank": 48, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}, None),
    "olmoe": ({"num_experts": 4, "num_experts_per_tok": 2}, None),
    "roberta": ({}, "later tokens"),
    "xglm": ({"d_model": 128, "num_layers": 2, "attention_heads": 4, "ffn_dim": 192}, "_softmax"),
}  # fmt: skip


@pytest.mark.parametrize("model_type", SAMPLE)
def test_served_or_refused(
    model_type: str,
    plan_of: Callable[..., Plan],
    model_of: Callable[..., PreTrainedModel],
    planned: Callable[..., Planned],
) -> None:
    overrides, word = SAMPLE[model_type]
    plan = plan_of(model_type, **overrides)
    if word is None:
        assert plan.refusals == ()
        assert plan.head is not None
        assert len(plan.attention) == 2
    else:
        assert word in plan.refusals[0].reason
    model = model_of(model_type, **overrides)
    again = planned(model)
    assert again.plan.to_json() == plan.to_json()
    if word is None:
        check_weights(model, again)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "olmoe"])
def test_the_work_of_planning_does_not_grow_with_the_layers(
    model_type: str,
    model_of: Callable[..., PreTrainedModel],
    planned: Callable[..., Planned],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each variant is traced once, and each set of layers is run once on meta to see that it fits."""
    overrides, _ = SAMPLE.get(model_type, ({}, None))
    done: list[str] = []
    for name in ("trace", "require_runs"):
        original = getattr(variants, name)
        monkeypatch.setattr(variants, name, lambda *a, _o=original, _n=name, **k: (done.append(_n), _o(*a, **k))[1])
    counts = []
    for layers in (7, 14):
        plan = planned(model_of(model_type, num_hidden_layers=layers, **overrides)).plan
        assert len(plan.attention) == layers
        counts.append((done.count("trace"), done.count("require_runs")))
        done.clear()
    assert counts[0] == counts[1]
    assert min(counts[0]) > 0


def check_weights(model: PreTrainedModel, result: Planned) -> None:
    """Every tensor of a checkpoint has its shape and a place of its own."""
    rules = result.plan.weights
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {rule.source for rule in rules} | set(result.tied) == set(shapes)
    assert all(rule.shape == shapes[rule.source] for rule in rules)
    places = [(rule.target, rule.shard) for rule in rules]
    assert len(places) == len(set(places))


def test_what_was_once_served_wrong_elsewhere_is_refused(plan_of: Callable[..., Plan]) -> None:
    """Models that look like plain decoders and are not: a state without a place, experts within attention, odd heads, encoders."""
    zaya = {"head_dim": 32, "num_hidden_layers": 4, "rope_parameters": None}
    odd: dict[str, dict[str, Any]] = {
        "falcon_h1": {"head_dim": 32, "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16},
        "jetmoe": {"kv_channels": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
        "zaya": zaya,
        "bert-generation": {},
    }
    for model_type, overrides in odd.items():
        assert plan_of(model_type, **overrides).refusals, model_type
