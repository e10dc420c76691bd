"""A layer whose weight others read stays as transformers wrote it: the engine's would keep the weight in another form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tf_backend.capabilities import Capabilities
from tf_backend.plan import Parallel
from tf_backend.plan.observe import observe
from tf_backend.plan.planner import make_plan
from torch import nn
from transformers import PreTrainedModel

Models = Callable[..., PreTrainedModel]


class Reading(nn.Module):
    """A gated MLP that computes its last product itself."""

    def __init__(self, mlp: Any, *, calls: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
            mlp.act_fn,
        )
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        out = torch.nn.functional.linear(hidden, self.down_proj.weight)
        return out + self.down_proj(hidden) if self.calls else out


def model_that_reads(model_of: Models, *, calls: bool) -> PreTrainedModel:
    model: Any = model_of("llama")
    for layer in model.model.layers:
        layer.mlp = Reading(layer.mlp, calls=calls)
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("calls", [False, True])
def test_it_is_seen_and_kept(calls: bool, model_of: Models, platform: Capabilities) -> None:
    model = model_that_reads(model_of, calls=calls)
    assert observe(model).borrowed == {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}
    plan = make_plan(model, Parallel(), platform).plan
    assert plan.refusals == ()
    names = {module.name for module in plan.modules}
    assert "model.layers.0.mlp.down_proj" not in names
    assert "model.layers.0.self_attn.o_proj" in names


def test_nothing_of_a_common_model_is_borrowed(model_of: Models) -> None:
    assert observe(model_of("llama-tied")).borrowed == frozenset()


@pytest.mark.parametrize("calls", [False, True])
def test_it_is_not_split_over_ranks(calls: bool, model_of: Models, platform: Capabilities) -> None:
    plan = make_plan(model_that_reads(model_of, calls=calls), Parallel(tensor=2), platform).plan
    (record,) = [record for record in plan.placement if record.cls == "Reading"]
    assert record.placement == "replicated"
    assert "down_proj" in record.reason if calls else record.reason
    assert not any(module.name.startswith("model.layers.0.mlp.down") for module in plan.modules)
