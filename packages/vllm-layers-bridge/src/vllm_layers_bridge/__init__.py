"""What a PyTorch layer becomes in vLLM: fusions, linear and norm layers, attention seam.

`vllm_layers_bridge.specs` says what a layer is, as data; `fusions` finds and rewrites; `layers` builds from a spec; `seams` is where a
model meets the engine's state on every step. vLLM is imported when a layer is built, and not before.
"""

from vllm_layers_bridge.errors import BridgeError, NotBuildable, NotFusable, WrongLayout
from vllm_layers_bridge.fusions import FUSIONS, Fusion, ModuleFacts

__all__ = ["FUSIONS", "BridgeError", "Fusion", "ModuleFacts", "NotBuildable", "NotFusable", "WrongLayout"]
