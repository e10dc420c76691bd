"""Layers that are used as none of the engine's can be stay as they are written, and so do forwards that would not run rewritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tf_backend.capabilities import Capabilities
from tf_backend.plan import Parallel, Plan
from tf_backend.plan.planner import make_plan
from torch import nn
from transformers import PreTrainedModel
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import LinearSpec

Models = Callable[..., PreTrainedModel]


class _MLP(nn.Module):
    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
            mlp.act_fn,
        )


class GivenByKeyword(_MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(input=self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class AskedForItsWidth(_MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden) * (self.down_proj.in_features / 128)


class GivenByKeywordBefore(_MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.tanh(self.gate_proj(input=x)) + self.up_proj(x))


def plan_with(cls: type[_MLP], model_of: Models, platform: Capabilities, ranks: int) -> Plan:
    model: Any = model_of("llama")
    for layer in model.model.layers:
        layer.mlp = cls(layer.mlp)
    found = make_plan(model, Parallel(tensor=ranks), platform).plan
    assert found.refusals == ()
    return found


@pytest.mark.parametrize("cls", [GivenByKeyword, AskedForItsWidth])
def test_a_linear_used_as_only_torchs_can_be_is_kept(cls: type[_MLP], model_of: Models, platform: Capabilities) -> None:
    names = {module.name for module in plan_with(cls, model_of, platform, 1).modules}
    assert "model.layers.0.mlp.down_proj" not in names
    assert "model.layers.0.self_attn.o_proj" in names


@pytest.mark.parametrize("cls", [GivenByKeyword, AskedForItsWidth])
def test_what_leads_to_it_is_not_split(cls: type[_MLP], model_of: Models, platform: Capabilities) -> None:
    found = plan_with(cls, model_of, platform, 2)
    (record,) = [record for record in found.placement if record.cls == cls.__name__]
    assert record.placement == "replicated"
    assert "`down_proj` stays as it is written" in record.reason


def test_beside_what_is_split_all_stay_whole(model_of: Models, platform: Capabilities) -> None:
    found = plan_with(GivenByKeywordBefore, model_of, platform, 2)
    layers = {module.name: module.layers for module in found.modules}
    assert "model.layers.0.mlp.gate_proj" not in layers
    for name in ("up_proj", "down_proj"):
        (layer,) = layers[f"model.layers.0.mlp.{name}"]
        assert isinstance(layer, LinearSpec)
        assert layer.style == "replicated"


class ViewsAcrossTokens(nn.Module):
    """Views a projection as rows of one head each: that needs a tensor of its own, not a part of a merged one."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, getattr(attention, name))
        self.config, self.head_dim = attention.config, attention.head_dim

    def heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.view(-1, self.head_dim).view(1, states.shape[1], -1, self.head_dim).transpose(1, 2)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        query, key, value = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        attended, _ = attention_leaf(self, self.heads(query), self.heads(key), self.heads(value))
        return self.o_proj(attended.flatten(2))


class ViewsAcrossFewTokens(ViewsAcrossTokens):
    """The same for few tokens alone: the path that more of them take makes a tensor of its own first."""

    def heads(self, states: torch.Tensor) -> torch.Tensor:
        return super().heads(states * 2.0 if states.shape[1] > 4 else states)


@pytest.mark.parametrize("cls", [ViewsAcrossTokens, ViewsAcrossFewTokens])
def test_a_forward_that_does_not_run_rewritten_is_kept(model_of: Models, cls: type[ViewsAcrossTokens]) -> None:
    from tf_backend.plan.observe import ModuleCall
    from tf_backend.plan.variants import VariantTable
    from vllm_layers_bridge.fusions import FUSIONS, ModuleFacts
    from vllm_layers_bridge.specs import AttentionSpec

    model: Any = model_of("llama")
    attention = model.model.layers[0].self_attn
    module = cls(attention)
    spec = AttentionSpec(
        4, attention.k_proj.out_features // attention.head_dim, attention.head_dim, attention.head_dim, 1.0
    )
    call = ModuleCall((torch.empty(1, 5, attention.q_proj.in_features, device="meta"),), {})
    facts = ModuleFacts("self_attn", (spec,), call.args, call.kwargs)
    outcome = VariantTable(FUSIONS).outcome(module, call, facts)
    assert outcome.layers == ()
    assert outcome.built.rewrite is None
    (miss,) = [miss for miss in outcome.built.variant.misses if miss.fusion == "qkv"]
    assert "its rewritten forward does not run: RuntimeError: view size is not compatible" in miss.reason
