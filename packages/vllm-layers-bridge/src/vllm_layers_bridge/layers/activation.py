"""Activation times up projection: vLLM's fused layers, by what the activation computes.

In: the name that `fx_match.activation` found by evaluating the model's activation. Out: a vLLM layer over [..., 2 n].
"""

from __future__ import annotations

from torch import nn

from vllm_layers_bridge.errors import NotBuildable

FUSED_ACTIVATIONS: dict[str, str] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
}
"""Activation as computed -> name under which vLLM keeps its fused act-and-mul layer."""


def build_activation_and_mul(activation: str) -> nn.Module:
    """vLLM's ``activation(x[..., :n]) * x[..., n:]``; NotBuildable for an activation that it has no layer for."""
    from vllm.model_executor.layers.activation import get_act_and_mul_fn

    if activation not in FUSED_ACTIVATIONS:
        raise NotBuildable(
            f"vLLM has no fused layer for the activation `{activation}`; it has {', '.join(sorted(FUSED_ACTIVATIONS))}."
        )
    layer: nn.Module = get_act_and_mul_fn(FUSED_ACTIVATIONS[activation])
    return layer
