"""From a `LayerSpec` to a vLLM layer. vLLM is imported when one is built, and not before."""

from vllm_layers_bridge.layers.activation import FUSED_ACTIVATIONS
from vllm_layers_bridge.layers.build import BuildContext, build

__all__ = ["FUSED_ACTIVATIONS", "BuildContext", "build"]
