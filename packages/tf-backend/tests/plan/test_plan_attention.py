"""Every call of the attention interface is accounted for: each size, each keyword, each mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ast_rewrite import Refused
from tf_backend.capabilities import Capabilities
from tf_backend.plan.attention import plan_attention, specs_by_module
from tf_backend.plan.masks import MaskKind
from tf_backend.plan.observe import AttentionCall, Observation
from tf_backend.plan.schema import Parallel
from torch import nn
from transformers import LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from vllm_layers_bridge.fusions import FUSIONS, AttentionCalls

TOKENS = 37
FULL = MaskKind("full")
GOOD = AttentionCall(
    "layers.3.attn",
    torch.Size([1, 4, TOKENS, 32]),
    torch.Size([1, 2, TOKENS, 32]),
    torch.Size([1, 2, TOKENS, 32]),
    FULL,
    {"scaling": 0.25},
)


class Model(nn.Module):
    """Something with a module to blame."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": nn.Identity()}) for _ in range(4))
        for layer in self.layers:
            layer["attn"].register_parameter("sink", nn.Parameter(torch.empty(4, device="meta")))
            layer["attn"].register_parameter("long", nn.Parameter(torch.empty(8, device="meta")))


MODEL = Model()
ATTENTION = MODEL.get_submodule(GOOD.module)


def run(platform: Capabilities, *calls: AttentionCall) -> Any:
    return plan_attention(MODEL, Observation(TOKENS, attention=list(calls)), platform)


def test_a_good_call(platform: Capabilities) -> None:
    (plan,), refusals = run(platform, GOOD)
    assert refusals == ()
    assert (plan.module, plan.index) == ("layers.3.attn", 3)
    spec = plan.spec
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_head_dim, spec.scale) == (4, 2, 32, 32, 0.25)
    assert (spec.sliding_window, spec.logits_soft_cap) == (None, None)
    assert specs_by_module((plan,)) == {"layers.3.attn": (spec,)}


def test_sinks_are_told_by_the_parameter_that_they_are(platform: Capabilities) -> None:
    (plan,), refusals = run(platform, replace(GOOD, keywords={"scaling": 0.25, "s_aux": ATTENTION.sink}))
    assert refusals == ()
    assert plan.spec.sinks == "sink"


@pytest.mark.parametrize(("head_dim", "value_head_dim"), [(64, 32), (32, 64), (64, 20)])
def test_heads_of_two_widths_are_kept_at_the_wider(head_dim: int, value_head_dim: int, platform: Capabilities) -> None:
    keys = torch.Size([1, 2, TOKENS, head_dim])
    call = replace(
        GOOD, query=torch.Size([1, 4, TOKENS, head_dim]), key=keys, value=torch.Size([*keys[:3], value_head_dim])
    )
    (plan,), refusals = run(platform, call)
    assert refusals == ()
    assert (plan.spec.head_dim, plan.spec.value_head_dim, plan.spec.cache_head_dim) == (head_dim, value_head_dim, 64)


@pytest.mark.parametrize("window", [16, None])
def test_the_window_comes_from_the_mask(window: int | None, platform: Capabilities) -> None:
    keywords = {"scaling": 1, "sliding_window": window, "softcap": 30}
    (plan,), _ = run(platform, replace(GOOD, mask=MaskKind("sliding", 16), keywords=keywords))
    assert (plan.spec.sliding_window, plan.spec.logits_soft_cap, plan.spec.scale) == (16, 30.0, 1.0)


@pytest.mark.parametrize(
    "keywords",
    [
        {"dropout": 0.0},
        {"is_causal": True},
        {"position_ids": torch.zeros(1, TOKENS)},
        {"use_cache": False, "output_attentions": True, "return_dict": True, "output_router_logits": False},
        {"s_aux": None, "position_bias": None, "softcap": None},
    ],
    ids=str,
)
def test_keywords_that_change_nothing(keywords: dict[str, Any], platform: Capabilities) -> None:
    plans, refusals = run(platform, replace(GOOD, keywords={"scaling": 0.25, **keywords}))
    assert len(plans) == 1
    assert refusals == ()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"keywords": {}}, "no constant `scaling`"),
        ({"keywords": {"scaling": torch.ones(())}}, "no constant `scaling`"),
        (
            {"keywords": {"scaling": 1.0, "s_aux": torch.ones(4)}},
            "`s_aux` to the attention interface, which is no parameter",
        ),
        (
            {"keywords": {"scaling": 1.0, "s_aux": ATTENTION.long}},
            "`s_aux` of (8,), expected one entry for each of 4 heads",
        ),
        ({"keywords": {"scaling": 1.0, "position_bias": torch.ones(4)}}, "`position_bias`"),
        ({"keywords": {"scaling": 1.0, "anything_new": 0}}, "`anything_new`"),
        ({"keywords": {"scaling": 1.0, "dropout": 0.1}}, "random"),
        ({"keywords": {"scaling": 1.0, "is_causal": False}}, "`is_causal`"),
        ({"keywords": {"scaling": 1.0, "softcap": torch.ones(())}}, "`softcap`"),
        ({"keywords": {"scaling": 1.0, "sliding_window": 99}, "mask": MaskKind("sliding", 16)}, "window of 99"),
        ({"keywords": {"scaling": 1.0, "sliding_window": 99}}, "mask that is full"),
        ({"mask": MaskKind("bidirectional")}, "later tokens"),
        ({"mask": MaskKind("unknown", reason="of something")}, "of something"),
        ({"value": torch.Size([1, 2, TOKENS, 40])}, "heads of 40"),
        ({"query": torch.Size([2, 4, TOKENS, 32])}, "not one row"),
        ({"query": torch.Size([1, 4, 1, 32])}, "not one row"),
        ({"key": torch.Size([1, 2, 2 * TOKENS, 32]), "value": torch.Size([1, 2, 2 * TOKENS, 32])}, "not one row"),
        ({"value": torch.Size([1, 2, TOKENS + 1, 32])}, "not one row"),
        ({"value": torch.Size([1, 4, TOKENS, 32])}, "not one row"),
        ({"key": torch.Size([1, 2, TOKENS, 64])}, "not one row"),
        ({"query": torch.Size([1, 3, TOKENS, 32])}, "3 heads of queries and 2 of keys and values"),
        ({"query": torch.Size([4, TOKENS, 32])}, "not one row"),
        ({name: torch.Size([1, 2, TOKENS, 48]) for name in ("query", "key", "value")}, "heads of 48"),
    ],
    ids=str,
)
def test_calls_that_the_engine_does_not_compute(changes: dict[str, Any], word: str, platform: Capabilities) -> None:
    plans, (refusal,) = run(platform, replace(GOOD, **changes))
    assert plans == ()
    assert word in refusal.reason
    assert refusal.reason.startswith("`Identity` ")
    assert refusal.module == "layers.3.attn"


def test_each_call_of_one_module_is_a_layer_of_its_own(platform: Capabilities) -> None:
    second = replace(GOOD, mask=MaskKind("sliding", 16))
    plans, refusals = run(platform, GOOD, replace(GOOD, module="layers.2.attn"), second)
    assert refusals == ()
    assert [(plan.module, plan.holder, plan.spec.sliding_window) for plan in plans] == [
        ("layers.3.attn", "attention_call_0", None),
        ("layers.2.attn", "", None),
        ("layers.3.attn", "attention_call_1", 16),
    ]


def test_several_calls_are_served_only_where_each_was_rewritten(model_of: Any, planned: Any) -> None:
    """Differential attention: two calls over one set of queries and keys."""
    plan = planned(model_of("diffllama")).plan
    assert plan.is_served
    assert {(a.module, a.holder) for a in plan.attention} == {
        (f"model.layers.{layer}.self_attn", f"attention_call_{call}") for layer in (0, 1) for call in (0, 1)
    }
    assert [fusion.name for v in plan.variants if v.class_name == "DiffLlamaAttention" for fusion in v.fusions] == [
        "qkv",
        "rotary",
        "attention_calls",
    ] * 2
    without = [fusion for fusion in FUSIONS if fusion.name != "attention_calls"]
    (refusal,) = planned(model_of("diffllama"), fusions=without).plan.refusals
    assert refusal.reason.startswith("`DiffLlamaAttention` calls the attention interface more than once")
    assert refusal.module == "model.layers.0.self_attn"


def test_the_reason_why_calls_cannot_be_told_apart(
    model_of: Any, planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise Refused("one call runs more than once")

    monkeypatch.setattr(AttentionCalls, "rewrite", refuse)
    (refusal,) = planned(model_of("diffllama")).plan.refusals
    assert "its source cannot be rewritten: one call runs more than once" in refusal.reason
    assert refusal.place is not None


def test_each_run_of_a_module_is_a_layer_of_its_own(platform: Capabilities) -> None:
    again = replace(GOOD, run=1, mask=MaskKind("sliding", 16))
    plans, refusals = run(platform, GOOD, replace(GOOD, module="layers.2.attn", run=4), again)
    assert refusals == ()
    assert [(plan.module, plan.holder, plan.turn, plan.spec.sliding_window) for plan in plans] == [
        ("layers.3.attn", "", 0, None),
        ("layers.2.attn", "", None, None),  # one of its runs attends
        ("layers.3.attn", "", 1, 16),
    ]
    assert [spec.sliding_window for spec in specs_by_module(plans)["layers.3.attn"]] == [None]


def test_several_calls_in_each_of_several_runs(platform: Capabilities) -> None:
    calls = [replace(GOOD, run=at) for at in (0, 0, 2, 2)]
    plans, refusals = run(platform, *calls)
    assert refusals == ()
    assert [(plan.holder, plan.turn) for plan in plans] == [
        (f"attention_call_{call}", turn) for turn in (0, 1) for call in (0, 1)
    ]
    assert len(specs_by_module(plans)["layers.3.attn"]) == 2


def test_runs_that_cannot_be_told_apart_are_refused(platform: Capabilities) -> None:
    again = replace(GOOD, run=1)
    _, (refusal,) = run(platform, GOOD, GOOD, again)
    assert "not as often each time that it runs" in refusal.reason
    wider = replace(again, query=torch.Size([1, 8, TOKENS, 32]))
    _, (refusal,) = run(platform, GOOD, wider)
    assert "heads of other sizes" in refusal.reason
    seen = Observation(TOKENS, attention=[GOOD, again], is_steady=False)
    _, (refusal,) = plan_attention(MODEL, seen, platform)
    assert "depends on its input" in refusal.reason


class Looping(LlamaModel):
    """Runs its layers `times` times, or once for each ten tokens."""

    times = 2
    by_length = False

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        times = position_ids.shape[1] // 10 if self.by_length else self.times
        embeds = self.embed_tokens(input_ids)
        kwargs.pop("inputs_embeds", None)
        for _ in range(times):
            output = super().forward(inputs_embeds=embeds, position_ids=position_ids, **kwargs)
            embeds = output.last_hidden_state
        return output


def _looping(model: Any, **attributes: Any) -> Any:
    model.model.__class__ = Looping
    for name, value in attributes.items():
        setattr(model.model, name, value)
    return model


def test_layers_that_run_again_keep_keys_and_values_for_each_time(model_of: Any, planned: Any) -> None:
    plan = planned(_looping(model_of("llama"), times=3)).plan
    assert plan.refusals == ()
    assert [(a.module, a.turn) for a in plan.attention] == [
        (f"model.layers.{layer}.self_attn", turn) for turn in (0, 1, 2) for layer in (0, 1)
    ]
    names = {fusion.name for v in plan.variants if v.class_name == "LlamaAttention" for fusion in v.fusions}
    assert {"qkv"} <= names <= {"qkv", "rotary"}
    split = planned(_looping(model_of("llama"), times=3), parallel=Parallel(tensor=2)).plan
    assert split.refusals == ()
    assert {p.placement for p in split.placement if p.cls == "LlamaAttention"} == {"split"}
    (refusal,) = planned(_looping(model_of("llama"), times=3), parallel=Parallel(pipeline=2)).plan.refusals
    assert "it does not run each of its layers once" in refusal.reason


def test_a_layer_that_calls_itself_again(model_of: Any, planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass has a cache of its own, in the order of the passes."""
    once = LlamaDecoderLayer.forward

    def twice(self: LlamaDecoderLayer, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return once(self, once(self, hidden_states, **kwargs), **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", twice)
    plan = planned(model_of("llama")).plan
    assert plan.refusals == ()
    assert [(a.module, a.turn) for a in plan.attention] == [
        (f"model.layers.{layer}.self_attn", turn) for layer in (0, 1) for turn in (0, 1)
    ]


def test_runs_whose_number_depends_on_the_tokens_are_refused(model_of: Any, planned: Any) -> None:
    (refusal, *_) = planned(_looping(model_of("llama"), by_length=True)).plan.refusals
    assert (
        "`LlamaAttention` attends in several runs, how often or in which order depends on its input" in refusal.reason
    )


def test_one_refusal_per_reason(platform: Capabilities) -> None:
    bad = [replace(GOOD, module=f"layers.{i}.attn", mask=MaskKind("bidirectional")) for i in range(4)]
    _, refusals = run(platform, *bad)
    assert [refusal.module for refusal in refusals] == ["layers.0.attn"]
