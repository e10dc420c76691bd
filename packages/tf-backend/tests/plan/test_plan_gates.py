"""A gate beside query, key and value: a linear of its own, split with the heads whose outputs it gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tf_backend.plan import Parallel
from vllm_layers_bridge.specs import LinearSpec, QKVLinearSpec

AFMOE = {
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_dense_layers": 1,
    "moe_intermediate_size": 64,
}


@pytest.mark.parametrize(
    ("ranks", "gate_style", "output_style"), [(1, "replicated", "replicated"), (2, "column", "row")]
)
def test_a_gate_stays_beside_the_merged_projections(
    ranks: int, gate_style: str, output_style: str, model_of: Callable[..., Any], planned: Callable[..., Any]
) -> None:
    plan = planned(model_of("afmoe", **AFMOE), parallel=Parallel(tensor=ranks)).plan
    assert plan.refusals == ()
    layers = {module.name: module.layers for module in plan.modules}
    (merged,) = (spec for spec in layers["model.layers.0.self_attn"] if isinstance(spec, QKVLinearSpec))
    assert [source.child for source in merged.sources] == ["q_proj", "k_proj", "v_proj"]
    for name, style in (("gate_proj", gate_style), ("o_proj", output_style)):
        (linear,) = layers[f"model.layers.0.self_attn.{name}"]
        assert isinstance(linear, LinearSpec)
        assert linear.style == style
