"""Plans and numbers of tiny models; faults in a rewrite are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tf_backend.capabilities import Capabilities
from tf_backend.errors import OptionRefused
from tf_backend.zoo import numbers_level, plan_level, serve_level, stand_ins
from tf_backend.zoo.numbers_level import difference, numbers_verdict
from tf_backend.zoo.plan_level import plan_facts
from tf_backend.zoo.stand_ins import NoStandIn
from tf_backend.zoo.types import Entry

Get = Callable[[str], Entry]


def test_a_plan_on_one_rank_and_on_two(entry: Get, platform: Capabilities) -> None:
    facts = plan_facts(entry("causal/llama"), platform)
    assert (facts.status, facts.reason, facts.tensor_2) == ("served", "", "split")
    assert facts.fusions == {"gated_mlp": 2, "qkv": 2, "rms_norm": 5, "rotary": 2}


def test_a_refusal_says_why_and_what_to_do(entry: Get, platform: Capabilities) -> None:
    facts = plan_facts(entry("causal/falcon"), platform)
    assert facts.status == "refused"
    assert "FalconAttention" in facts.reason
    assert "--model-impl vllm" in facts.reason
    assert facts.tensor_2 == ""


def test_a_miss_has_its_class_fusion_and_line(entry: Get, platform: Capabilities) -> None:
    (miss,) = plan_facts(entry("causal/gpt_neox"), platform).misses
    assert miss.startswith("GPTNeoXAttention, packed_qkv: ")
    assert "(line " in miss


@pytest.mark.parametrize(
    ("name", "variants"),
    [("causal/llama", 3), ("causal/phi3", 3), ("causal/gpt2", 1), ("causal/diffllama", 4), ("causal/qwen2_moe", 4)],
)
def test_rewrites_compute_what_their_originals_do(entry: Get, platform: Capabilities, name: str, variants: int) -> None:
    verdict = numbers_verdict(entry(name), platform)
    assert (verdict.status, verdict.compared, verdict.reason) == ("equal", variants, "")
    assert verdict.worst < 1e-5


@pytest.mark.parametrize(("name", "cls"), [("causal/llama", "LlamaAttention"), ("causal/phi3", "Phi3Attention")])
def test_a_shard_in_the_wrong_place_is_seen(
    entry: Get, platform: Capabilities, monkeypatch: pytest.MonkeyPatch, name: str, cls: str
) -> None:
    whole = stand_ins._merged

    def swapped(in_features: int, sources: tuple[Any, ...], *rest: Any) -> torch.nn.Linear:
        first, second, third = sources if len(sources) == 3 else (*sources, None)
        return whole(in_features, sources if third is None else (first, third, second), *rest)

    monkeypatch.setattr(stand_ins, "_merged", swapped)
    verdict = numbers_verdict(entry(name), platform)
    assert verdict.status == "wrong"
    assert cls in verdict.reason


def test_shared_experts_that_the_runner_leaves_out_are_seen(
    entry: Get, platform: Capabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbers_level, "experts_stand_in", lambda spec, block, name: block.get_submodule(name))
    verdict = numbers_verdict(entry("causal/qwen2_moe"), platform)
    assert verdict.status == "wrong"
    assert "Qwen2MoeSparseMoeBlock, shared_experts" in verdict.reason


def test_a_layer_without_a_stand_in_is_told_and_the_others_are_compared(
    entry: Get, platform: Capabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise NoStandIn("some layer")

    monkeypatch.setattr(stand_ins, "_RMSNorm", none)
    verdict = numbers_verdict(entry("causal/llama"), platform)
    assert (verdict.status, verdict.compared) == ("equal", 2)
    assert verdict.reason == "LlamaRMSNorm: no plain layer stands for some layer"


def test_a_model_that_is_not_tiny_is_left_out(
    entry: Get, platform: Capabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_level, "LARGEST", 1000)
    verdict = numbers_verdict(entry("causal/llama"), platform)
    assert verdict.status == "skipped"
    assert "too many" in verdict.reason


def test_difference_is_relative_and_infinite_where_things_are_not_alike() -> None:
    one = torch.ones(2, 8)
    assert difference(one, one.clone()) == 0.0
    assert difference((one * 1.01, None), (one, None)) == pytest.approx(0.01, rel=1e-4)
    assert difference(one[:1], one) == float("inf")
    assert difference(one.double(), one) == float("inf")
    assert difference((), ()) == float("inf"), "nothing compared is not equal"
    assert difference(torch.tensor([float("nan"), 1.0]), torch.tensor([2.0, 1.0])) != 0.0


class _Judge:
    def __init__(self, *answer: Any) -> None:
        self.answer = answer

    def prepare(self) -> None:
        return

    def judge(self, skeleton: Any, folder: Any) -> Any:
        assert skeleton.device.type == "meta"
        assert not folder.exists()
        return self.answer


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (("equal", "", 134, 1e-5), "equal"),
        (("wrong", "run 1: off", 3, 1.0), "wrong"),
        (("failed", "died", 0, 0.0), "failed"),
    ],
)
def test_the_oracle_decides_the_level_serve(entry: Get, answer: tuple[Any, ...], status: str) -> None:
    verdict = serve_level.serve_verdict(_Judge(*answer), entry("causal/llama"))
    assert (verdict.status, verdict.reason, verdict.compared) == (status, answer[1], answer[2])


def test_without_an_oracle_the_level_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_level, "entry_points", lambda **_: ())
    with pytest.raises(OptionRefused, match="--level serve needs an oracle"):
        serve_level.oracle()
