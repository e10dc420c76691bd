"""One function from a spec to a layer: the only place that knows which builder a spec goes to.

In: a `LayerSpec`, the full name the layer will have, the engine's quantization config. Out: a vLLM layer on the current device
and in the current default dtype, its weights not loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from vllm_layers_bridge.errors import NotBuildable
from vllm_layers_bridge.layers.activation import build_activation_and_mul
from vllm_layers_bridge.layers.embedding import build_embedding, build_head
from vllm_layers_bridge.layers.linear import build_linear, build_merged_linear, build_qkv_linear
from vllm_layers_bridge.layers.norm import build_rms_norm
from vllm_layers_bridge.layers.rotary import build_rotary
from vllm_layers_bridge.specs import (
    ActivationAndMulSpec,
    EmbeddingSpec,
    HeadLinearSpec,
    LayerSpec,
    LinearSpec,
    MergedLinearSpec,
    PositionTableSpec,
    QKVLinearSpec,
    RMSNormSpec,
    RotarySpec,
)


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What building needs of the engine."""

    quant_config: Any = None


def build(spec: LayerSpec, prefix: str, context: BuildContext) -> nn.Module:
    """Build the vLLM layer that `spec` describes. `prefix` is the full name, e.g. ``model.layers.0.mlp.gate_up_proj``.

    Raises:
        NotBuildable: the installed vLLM has no layer for it, or its layer does not take these sizes on these ranks.
    """
    try:
        return _build(spec, prefix, context)
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise NotBuildable(f"vLLM cannot build `{prefix}` ({spec}): {error}") from error


def _build(spec: LayerSpec, prefix: str, context: BuildContext) -> nn.Module:
    match spec:
        case LinearSpec():
            return build_linear(spec, prefix, context.quant_config)
        case MergedLinearSpec():
            return build_merged_linear(spec, prefix, context.quant_config)
        case QKVLinearSpec():
            return build_qkv_linear(spec, prefix, context.quant_config)
        case ActivationAndMulSpec():
            return build_activation_and_mul(spec.activation)
        case RMSNormSpec():
            return build_rms_norm(spec)
        case RotarySpec():
            return build_rotary(spec)
        case EmbeddingSpec():
            return build_embedding(spec, prefix, context.quant_config)
        case HeadLinearSpec():
            return build_head(spec, prefix, context.quant_config)
        case PositionTableSpec():
            raise NotBuildable(f"`{prefix}` is a table made from the module it replaces: build a `PositionTable`")
