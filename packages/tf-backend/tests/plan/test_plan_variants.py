"""Instances that run the same code share a variant; a doubt about one instance or one fusion stays with it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ast_rewrite import Patch, Refused
from fx_match import Match, Miss, Trace, any_value, find, op
from tf_backend.plan.fusions import installed_fusions
from tf_backend.plan.observe import ModuleCall
from tf_backend.plan.planner import Planned
from tf_backend.plan.schema import Plan
from tf_backend.plan.variants import VariantTable
from torch import nn
from transformers import PreTrainedModel
from vllm_layers_bridge.fusions import GatedMLP, RMSNorm
from vllm_layers_bridge.fusions.protocol import ModuleFacts

Plans = Callable[..., Plan]
Models = Callable[..., PreTrainedModel]
WIDTH = 16


def by_class(plan: Plan, name: str) -> list[str]:
    """Variant of each instance of a class, in the model's order."""
    ids = [
        module.variant for module in plan.modules if module.variant and plan.variant(module.variant).class_name == name
    ]
    return [identity for identity in ids if identity]


def test_layers_that_do_not_differ_share_one_variant_per_class(plan_of: Plans) -> None:
    plan = plan_of("llama", num_hidden_layers=4)
    for name, count in (("LlamaAttention", 4), ("LlamaMLP", 4), ("LlamaRMSNorm", 9), ("LlamaDecoderLayer", 4)):
        variants = by_class(plan, name)
        assert len(variants) == count
        assert len(set(variants)) == 1


def test_layers_without_rope_are_a_variant_of_their_own(plan_of: Plans) -> None:
    plan = plan_of("smollm3")
    variants = by_class(plan, "SmolLM3Attention")
    assert variants[0] == variants[2] != variants[1] == variants[3]
    guards = [{guard.name: guard for guard in plan.variant(identity).guards} for identity in variants[:2]]
    assert [guard["self.use_rope"].value for guard in guards] == ["1", "0"]
    assert guards[0]["self.use_rope"].kind == "attribute"
    assert guards[0]["self.use_rope"].line is not None
    fusions = [[fusion.name for fusion in plan.variant(identity).fusions] for identity in variants[:2]]
    assert fusions == [["qkv", "rotary"], ["qkv"]]


def test_layers_with_and_without_a_window_are_two_variants(plan_of: Plans) -> None:
    plan = plan_of("qwen2-sliding")
    variants = by_class(plan, "Qwen2Attention")
    assert len(set(variants)) == 2
    windows = [next(g.value for g in plan.variant(v).guards if g.name == "self.sliding_window") for v in variants]
    assert windows == ["None", "16"]
    assert [call.spec.sliding_window for call in plan.attention] == [None, 16]


def test_a_variant_shows_what_was_rewritten_and_where(plan_of: Plans) -> None:
    plan = plan_of("llama")
    variant = plan.variant(by_class(plan, "LlamaMLP")[0])
    assert variant.cls == "transformers.models.llama.modeling_llama:LlamaMLP"
    assert variant.place is not None
    assert variant.place.module == "transformers.models.llama.modeling_llama"
    assert variant.trace.complete
    assert variant.rewritten is not None
    assert "gate_up_proj" in variant.rewritten
    assert variant.diff is not None
    assert "-" in variant.diff
    (fusion,) = variant.fusions
    assert (fusion.name, fusion.replaces_module) == ("gated_mlp", False)
    assert variant.place.line < fusion.lines[0] < variant.place.line + 10


def test_one_instance_that_cannot_be_fused_is_left_out_alone(model_of: Models, planned: Callable[..., Planned]) -> None:
    model = model_of("llama", num_hidden_layers=3)
    with torch.device("meta"):
        model.model.layers[1].mlp.gate_proj = nn.Linear(128, 192, bias=True)
    plan = planned(model).plan
    assert plan.refusals == ()
    mlps = {module.name: module for module in plan.modules if module.name.endswith(".mlp")}
    assert [mlps[f"model.layers.{i}.mlp"].action for i in range(3)] == ["rewrite", "keep", "rewrite"]
    kept = plan.variant(str(mlps["model.layers.1.mlp"].variant))
    (miss,) = kept.misses
    assert miss.fusion == "gated_mlp"
    assert "bias" in miss.reason
    names = {module.name for module in plan.modules}
    assert {"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"} <= names
    assert {count.cls: count.count for count in plan.summary()}["LlamaAttention"] == 3


class Refusing(GatedMLP):
    """Finds what the gated MLP finds, and edits half of it before it is refused."""

    name = "refusing"

    def rewrite(self, match: Match, trace: Trace, patch: Patch) -> None:
        super().rewrite(match, trace, patch)
        raise Refused("the edit cannot be proved safe")


@pytest.mark.parametrize("first", [True, False])
def test_a_rewrite_that_is_refused_leaves_no_trace_and_the_others_stand(
    first: bool, model_of: Models, planned: Callable[..., Planned], plan_of: Plans
) -> None:
    fusions = (Refusing(), *installed_fusions()) if first else (*installed_fusions(), Refusing())
    plan = planned(model_of("llama"), fusions=fusions).plan
    assert plan.summary() == plan_of("llama").summary()
    variant = plan.variant(by_class(plan, "LlamaMLP")[0])
    assert variant.rewritten == plan_of("llama").variant(by_class(plan_of("llama"), "LlamaMLP")[0]).rewritten
    (miss,) = variant.misses
    assert miss.fusion == "refusing"
    assert miss.reason.startswith("its source cannot be rewritten: ")
    assert ("cannot be proved safe" in miss.reason) == first


class MLP(nn.Module):
    """A plain gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, device="meta") for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Norm(nn.Module):
    """An RMS norm that takes another path for long inputs."""

    longest: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, device="meta"))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.longest is not None and x.shape[1] > self.longest:
            return x
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Whole(RMSNorm):
    """Takes the place of any module that takes a root, and asks no question."""

    name = "whole"

    def match(self, trace: Trace) -> Match | Miss:
        return find(op("rsqrt")(any_value("input")), trace)


def call(*shape: int, **keywords: Any) -> ModuleCall:
    return ModuleCall((torch.empty(shape, device="meta"),), keywords)


def outcome(table: VariantTable, module: nn.Module, how: ModuleCall) -> Any:
    with torch.no_grad():
        return table.outcome(module, how, ModuleFacts("the.module"))


def test_calls_of_another_rank_or_another_child_are_other_variants() -> None:
    table = VariantTable([GatedMLP()])
    first = outcome(table, MLP(), call(1, 5, WIDTH)).built
    assert outcome(table, MLP(), call(1, 9, WIDTH)).built is first
    assert outcome(table, MLP(), call(5, WIDTH)).built is not first
    other = MLP()
    other.extra = nn.Linear(WIDTH, WIDTH, device="meta")
    assert outcome(table, other, call(1, 5, WIDTH)).built is not first
    assert len({built.variant.id for built in table.built}) == 3


def test_an_attribute_that_the_forward_reads_parts_instances() -> None:
    table = VariantTable([RMSNorm()])
    norms = [Norm(), Norm(), Norm()]
    norms[2].eps = 1e-5
    ids = [outcome(table, norm, call(1, 5, WIDTH)).built.variant.id for norm in norms]
    assert ids[0] == ids[1] != ids[2]


def test_an_attribute_that_is_not_read_does_not() -> None:
    table = VariantTable([GatedMLP()])
    mlps = [MLP(), MLP()]
    mlps[0].layer_idx, mlps[1].layer_idx = 0, 1
    assert outcome(table, mlps[0], call(1, 5, WIDTH)).built is outcome(table, mlps[1], call(1, 5, WIDTH)).built


def test_a_module_is_not_replaced_on_the_word_of_one_size() -> None:
    norm = Norm()
    norm.longest = 8
    built = outcome(VariantTable([Whole()]), norm, call(1, 5, WIDTH)).built
    assert built.applied == ()
    (miss,) = built.variant.misses
    assert "another path unless" in miss.reason
    assert "is False" in miss.reason
    assert miss.place is not None
    assert "self.longest" in miss.place.text
    assert outcome(VariantTable([RMSNorm()]), Norm(), call(1, 5, WIDTH)).built.applied != ()


def test_a_module_that_is_called_in_two_ways_is_not_replaced() -> None:
    how = call(1, 5, WIDTH)
    how.signatures.add(call(1, 2, 5, WIDTH).signature)
    built = outcome(VariantTable([RMSNorm()]), Norm(), how).built
    assert built.applied == ()
    assert [miss.reason for miss in built.variant.misses] == ["it is called in different ways"]


def test_a_forward_without_source_stays_as_it_is() -> None:
    namespace: dict[str, Any] = {"nn": nn}
    exec("def forward(self, x):\n    return self.down(nn.functional.silu(self.gate(x)) * self.up(x))", namespace)
    sourceless = type("Sourceless", (MLP,), {"forward": namespace["forward"]})
    built = outcome(VariantTable([GatedMLP()]), sourceless(), call(1, 5, WIDTH)).built
    assert built.applied == ()
    assert built.rewrite is None
    assert "cannot be rewritten" in built.variant.misses[0].reason


def test_objects_in_a_call_are_told_by_class() -> None:
    one, two = call(1, 5, WIDTH, cache=SimpleNamespace(a=1)), call(1, 7, WIDTH, cache=SimpleNamespace(a=2))
    assert one.signature == two.signature
    assert one.signature != call(1, 5, WIDTH, cache=None).signature
    assert one.signature != call(1, 5, WIDTH, other=SimpleNamespace()).signature


class AsksForAWidth(nn.Module):
    def __init__(self, *, shares: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, device="meta"), nn.Linear(4, 4, device="meta")
        if shares:
            self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x) * self.second.out_features


def test_an_instance_whose_children_are_one_says_nothing_of_another() -> None:
    table, call = VariantTable(()), ModuleCall((torch.empty(1, 3, 4, device="meta"),), {})
    for shares, asked in ((True, "first.out_features"), (False, "second.out_features"), (True, "first.out_features")):
        assert set(table.trace_of(AsksForAWidth(shares=shares), call).reads) == {asked}
