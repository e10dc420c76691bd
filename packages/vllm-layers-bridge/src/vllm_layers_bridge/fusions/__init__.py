"""Fusions about vLLM's layers, in order of priority: one file each, with its pattern on top.

`FUSIONS` is data. To read what a fusion does, read its file.
"""

from vllm_layers_bridge.fusions.attention_calls import AttentionCalls
from vllm_layers_bridge.fusions.gate_up import GateUp
from vllm_layers_bridge.fusions.gated_mlp import GatedMLP
from vllm_layers_bridge.fusions.latent_attention import LatentAttention
from vllm_layers_bridge.fusions.packed_mlp import PackedGatedMLP
from vllm_layers_bridge.fusions.packed_qkv import PackedQKV
from vllm_layers_bridge.fusions.protocol import Fusion, ModuleFacts, is_plain_linear
from vllm_layers_bridge.fusions.qkv import QKV
from vllm_layers_bridge.fusions.rms_norm import RMSNorm
from vllm_layers_bridge.fusions.rotary import Rotary
from vllm_layers_bridge.fusions.row_positions import RowPositions

FUSIONS: tuple[Fusion, ...] = (
    RMSNorm(), GatedMLP(), GateUp(), PackedGatedMLP(), QKV(), PackedQKV(), Rotary(), AttentionCalls(), RowPositions(),
)  # fmt: skip
"""In order of priority: a fusion that takes a whole module goes before those that edit its forward.

`LatentAttention` is not among them: it is made for the sizes that an engine takes."""

__all__ = [
    "FUSIONS",
    "QKV",
    "AttentionCalls",
    "Fusion",
    "GateUp",
    "GatedMLP",
    "LatentAttention",
    "ModuleFacts",
    "PackedGatedMLP",
    "PackedQKV",
    "RMSNorm",
    "Rotary",
    "RowPositions",
    "is_plain_linear",
]
