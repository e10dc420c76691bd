"""Specs become vLLM's own layers, unchanged and not subclassed, or the reason why not; its kernels are off here, as with a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm_layers_bridge.errors import NotBuildable
from vllm_layers_bridge.layers import FUSED_ACTIVATIONS, BuildContext, build
from vllm_layers_bridge.specs import (
    ActivationAndMulSpec,
    EmbeddingSpec,
    HeadLinearSpec,
    LayerSpec,
    LinearSpec,
    MergedLinearSpec,
    QKVLinearSpec,
    RMSNormSpec,
    Source,
)

pytestmark = pytest.mark.engine

GATE_UP = MergedLinearSpec("gate_up_proj", (Source("gate", 0, 6), Source("up", 1, 6)), 4, bias=False)
QKV = QKVLinearSpec(
    "qkv_proj",
    (Source("q", "q", 32), Source("k", "k", 16), Source("v", "v", 16)),
    in_features=4,
    bias=True,
    head_dim=8,
    value_head_dim=8,
    num_heads=4,
    num_kv_heads=2,
    sizes_attribute="qkv_sizes",
)

CASES: list[tuple[LayerSpec, str, dict[str, tuple[int, ...]]]] = [
    (LinearSpec("o", 4, 6, bias=False), "ReplicatedLinear", {"weight": (6, 4)}),
    (LinearSpec("o", 4, 6, bias=True, style="column"), "ColumnParallelLinear", {"weight": (6, 4), "bias": (6,)}),
    (LinearSpec("o", 4, 6, bias=True, style="row"), "RowParallelLinear", {"weight": (6, 4), "bias": (6,)}),
    (GATE_UP, "MergedColumnParallelLinear", {"weight": (12, 4)}),
    (QKV, "QKVParallelLinear", {"weight": (64, 4), "bias": (64,)}),
    (RMSNormSpec(8, 1e-6, 0.0, True), "RMSNorm", {"weight": (8,)}),
    (RMSNormSpec(8, 1e-6, 0.0, False), "RMSNorm", {}),
    (RMSNormSpec(8, 1e-6, 1.0, True), "GemmaRMSNorm", {"weight": (8,)}),
    (ActivationAndMulSpec("a", "silu"), "SiluAndMul", {}),
    (ActivationAndMulSpec("a", "gelu"), "GeluAndMul", {}),
    (EmbeddingSpec("e", 100, 8), "VocabParallelEmbedding", {"weight": (128, 8)}),
    (HeadLinearSpec("h", 100, 8, bias=False), "ParallelLMHead", {"weight": (128, 8)}),
    (HeadLinearSpec("h", 100, 8, bias=True), "ParallelLMHead", {"weight": (128, 8), "bias": (128,)}),
]


def described(specs: list[LayerSpec]) -> list[tuple[str, str, dict[str, tuple[int, ...]]]]:
    layers = [build(spec, "model.layers.0.block.layer", BuildContext()) for spec in specs]
    return [
        (type(layer).__name__, type(layer).__module__, {n: tuple(p.shape) for n, p in layer.named_parameters()})
        for layer in layers
    ]


def test_each_spec_becomes_vllms_own_layer(in_vllm: Callable[..., Any]) -> None:
    found = in_vllm(described, [spec for spec, _, _ in CASES])
    assert [(name, shapes) for name, _, shapes in found] == [(name, shapes) for _, name, shapes in CASES]
    assert all(module.startswith("vllm.model_executor.layers.") for _, module, _ in found)


def test_a_linear_gives_the_tensor_alone(in_vllm: Callable[..., Any]) -> None:
    def outputs() -> list[tuple[int, ...]]:
        shapes = []
        for spec in (CASES[0][0], CASES[1][0], CASES[2][0], GATE_UP, QKV):
            layer = build(spec, "model.layers.0.block.layer", BuildContext())
            layer.quant_method.process_weights_after_loading(layer)
            shapes.append(tuple(layer(torch.zeros(1, 3, 4)).shape))
        return shapes

    assert in_vllm(outputs) == [(1, 3, 6), (1, 3, 6), (1, 3, 6), (1, 3, 12), (1, 3, 64)]


def test_each_fused_activation_computes_what_its_name_says(in_vllm: Callable[..., Any]) -> None:
    plain = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    assert plain.keys() == FUSED_ACTIVATIONS.keys()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 2

    def computed(name: str) -> torch.Tensor:
        return build(ActivationAndMulSpec("a", name), "a", BuildContext())(x)

    for name, function in plain.items():
        expected = function(x[..., :32]) * x[..., 32:]
        torch.testing.assert_close(in_vllm(computed, name), expected, rtol=1e-5, atol=1e-5)
    first, second = plain["gelu"](x[..., :32]) * x[..., 32:], plain["gelu_tanh"](x[..., :32]) * x[..., 32:]
    assert (first - second).norm() / first.norm() > 1e-4, "the two differ by more than the tolerance"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (
            ActivationAndMulSpec("a", "relu"),
            "vLLM has no fused layer for the activation `relu`; it has gelu, gelu_tanh",
        ),
        (RMSNormSpec(8, 1e-6, 0.5, True), "no RMS norm with weight offset 0.5"),
        (RMSNormSpec(8, 1e-6, 1.0, False), "no RMS norm with weight offset 1.0"),
    ],
)
def test_what_vllm_has_no_layer_for_is_refused(in_vllm: Callable[..., Any], spec: LayerSpec, reason: str) -> None:
    def refused() -> str:
        try:
            build(spec, "model.layers.0.block.layer", BuildContext())
        except NotBuildable as error:
            return str(error)
        return ""

    assert reason in in_vllm(refused)


def test_what_vllm_raises_itself_names_the_layer(in_vllm: Callable[..., Any]) -> None:
    class Refuses:
        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            raise ValueError("the group size 128 does not divide 4")

    def refused() -> str:
        try:
            build(GATE_UP, "model.layers.7.mlp.gate_up_proj", BuildContext(Refuses()))
        except NotBuildable as error:
            return str(error)
        return ""

    found = in_vllm(refused)
    assert found.startswith("vLLM cannot build `model.layers.7.mlp.gate_up_proj` (MergedLinearSpec(")
    assert found.endswith("the group size 128 does not divide 4")
