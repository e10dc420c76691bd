"""Specs are data: they travel as JSON and come back equal, each as its own kind."""

from __future__ import annotations

import msgspec
import pytest
from vllm_layers_bridge.specs import (
    ActivationAndMulSpec,
    AttentionSpec,
    EmbeddingSpec,
    HeadLinearSpec,
    LayerSpec,
    LinearSpec,
    MergedLinearSpec,
    QKVLinearSpec,
    RMSNormSpec,
    Source,
)

SPECS: list[LayerSpec] = [
    LinearSpec("o_proj", 4, 6, bias=False, style="row"),
    MergedLinearSpec("gate_up_proj", (Source("gate", 0, 6), Source("up", 1, 6)), 4, bias=True),
    QKVLinearSpec(
        "qkv_proj", (Source("q", "q", 8), Source("k", "k", 4), Source("v", "v", 4)), 4, False, 4, 4, 2, 1, "qkv_sizes"
    ),
    ActivationAndMulSpec("act_and_mul", "silu"),
    RMSNormSpec(8, 1e-6, 1.0, True),
    EmbeddingSpec("embed_tokens", 100, 8),
    HeadLinearSpec("lm_head", 100, 8, bias=False, tied_to="model.embed_tokens"),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_a_spec_comes_back_from_json_as_what_it_was(spec: LayerSpec) -> None:
    assert msgspec.json.decode(msgspec.json.encode(spec), type=LayerSpec) == spec


def test_specs_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SPECS[0].name = "other"


def test_an_attention_spec_comes_back_from_json() -> None:
    spec = AttentionSpec(4, 2, 8, 8, 0.125, sliding_window=16, logits_soft_cap=30.0)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=AttentionSpec) == spec
    assert msgspec.structs.replace(spec, sliding_window=None) == AttentionSpec(4, 2, 8, 8, 0.125, None, 30.0)


def test_a_spec_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="convolution"):
        msgspec.json.decode(b'{"type": "convolution", "name": "c"}', type=LayerSpec)
