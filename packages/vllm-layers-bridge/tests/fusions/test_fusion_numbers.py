"""Fused modules of real vLLM layers give the numbers of the original in float32, and a wrong shard shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPTBigCodeConfig, LlamaConfig, Phi3Config, Qwen3Config, SmolLM3Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_bigcode.modeling_gpt_bigcode import GPTBigCodeAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3Attention, Phi3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.smollm3.modeling_smollm3 import SmolLM3Attention
from transformers.pytorch_utils import Conv1D
from vllm_layers_bridge.fusions import QKV, GatedMLP, ModuleFacts, PackedGatedMLP, PackedQKV, RMSNorm

pytestmark = pytest.mark.engine

TOLERANCE = 1e-5
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
X = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(1))
ANGLES = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(2))
ROTARY = (ANGLES.cos(), ANGLES.sin())


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def drawn(module: nn.Module) -> nn.Module:
    """Weights of such a size that every part of the module matters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            spread = 0.3 if parameter.ndim > 1 else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return module.eval().requires_grad_(False)


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


class TanhGeluMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 96), nn.Linear(64, 96)
        self.down_proj = nn.Linear(96, 64)

    def forward(self, x):
        return self.down_proj(self.up_proj(x) * F.gelu(self.gate_proj(x), approximate="tanh"))


class GeluMLP(TanhGeluMLP):
    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


class InPlaceMLP(TanhGeluMLP):
    def forward(self, x):
        gate = F.silu(self.gate_proj(x))
        up = self.up_proj(x)
        gate *= up
        return self.down_proj(gate)


class StatementsMLP(TanhGeluMLP):
    def forward(self, x):
        up = self.up_proj(x)
        gate = self.gate_proj(x)
        gate = F.silu(gate)
        return self.down_proj(gate * up)


class ReluMLP(TanhGeluMLP):
    def forward(self, x):
        return self.down_proj(F.relu(self.gate_proj(x)) * self.up_proj(x))


MLPS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaMLP(LlamaConfig(**SIZES)),
    "llama-biased": lambda: LlamaMLP(LlamaConfig(mlp_bias=True, **SIZES)),
    "gelu": GeluMLP,
    "gelu-tanh": TanhGeluMLP,
    "in-place": InPlaceMLP,
    "statements": StatementsMLP,
    "relu": ReluMLP,
}


@pytest.mark.parametrize("name", MLPS)
def test_gated_mlp(
    fuse: Callable[..., Any], in_vllm: Callable[..., Any], loader: Callable[..., Any], name: str
) -> None:
    module = drawn(MLPS[name]())
    weights, expected = weights_of(module), module(X)
    fused = fuse(GatedMLP(), module, X)

    def run(**changes: Any) -> float:
        applied = fused.apply(loader(weights, **changes))
        assert not hasattr(applied, "gate_proj")
        return difference(applied(X), expected)

    assert in_vllm(run) < TOLERANCE
    assert in_vllm(lambda: run(shards={"gate_proj": 1, "up_proj": 0})) > 10 * TOLERANCE
    if name != "llama":
        assert in_vllm(lambda: run(skip=("bias",))) > 10 * TOLERANCE


class SwappedMLP(nn.Module):
    """Up lies first in the weight, and the gate is activated by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(64, 192), nn.Linear(96, 64)

    def forward(self, x):
        up, gate = self.fc(x).split(96, dim=-1)
        return self.out(up * F.gelu(gate))


class TransposedMLP(SwappedMLP):
    """The weight is [in, out], and the parts are slices."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = Conv1D(192, 64)

    def forward(self, x):
        packed = self.fc(x)
        half = packed.shape[-1] // 2
        return self.out(F.silu(packed[..., :half]) * packed[..., half:])


PACKED: dict[str, Callable[[], nn.Module]] = {
    "phi3": lambda: Phi3MLP(Phi3Config(pad_token_id=0, **SIZES)),
    "swapped": SwappedMLP,
    "transposed": TransposedMLP,
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_gated_mlp(
    fuse: Callable[..., Any], in_vllm: Callable[..., Any], loader: Callable[..., Any], name: str
) -> None:
    module = drawn(PACKED[name]())
    weights, expected = weights_of(module), module(X)
    fused = fuse(PackedGatedMLP(), module, X)
    packed = fused.specs[0].name

    def run(**changes: Any) -> float:
        applied = fused.apply(loader(weights, **changes))
        assert type(getattr(applied, packed)).__module__.startswith("vllm.")
        return difference(applied(X), expected)

    assert in_vllm(run) < TOLERANCE
    assert in_vllm(lambda: run(shards={packed: {0: 1, 1: 0}})) > 10 * TOLERANCE, "which half is the gate matters"
    if name != "phi3":
        assert in_vllm(lambda: run(skip=("bias",))) > 10 * TOLERANCE


ATTENTIONS: dict[str, Callable[[], nn.Module]] = {
    "llama-biased": lambda: LlamaAttention(LlamaConfig(attention_bias=True, **SIZES), 0),
    "qwen3": lambda: Qwen3Attention(Qwen3Config(**SIZES), 0),
    "smollm3": lambda: SmolLM3Attention(SmolLM3Config(no_rope_layers=[1, 0], **SIZES), 0),
    "smollm3-without-rotary": lambda: SmolLM3Attention(SmolLM3Config(no_rope_layers=[1, 0], **SIZES), 1),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_qkv(
    fuse: Callable[..., Any],
    in_vllm: Callable[..., Any],
    loader: Callable[..., Any],
    attention_calls: Callable[[nn.Module], None],
    attention_facts: Callable[..., ModuleFacts],
    name: str,
) -> None:
    module = drawn(ATTENTIONS[name]())
    arguments = {"hidden_states": X, "position_embeddings": ROTARY, "attention_mask": None}
    attention_calls(module)
    fused = fuse(QKV(), module, facts=attention_facts(4, 2, 16), **arguments)
    module.config._attn_implementation = "eager"
    weights, expected = weights_of(module), module(**arguments)[0]

    def run(**changes: Any) -> float:
        applied = fused.apply(loader(weights, **changes))
        assert not hasattr(applied, "q_proj")
        return difference(applied(**arguments)[0], expected)

    assert in_vllm(run) < TOLERANCE
    assert in_vllm(lambda: run(shards={"k_proj": "v", "v_proj": "k"})) > 10 * TOLERANCE
    if name == "llama-biased":
        assert in_vllm(lambda: run(skip=("bias",))) > 10 * TOLERANCE


PACKED_ATTENTIONS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "phi3": (lambda: Phi3Attention(Phi3Config(pad_token_id=0, **SIZES), 0), 2),
    "gpt2": (lambda: GPT2Attention(GPT2Config(n_embd=64, n_head=4), layer_idx=0), 4),
    "gpt_bigcode": (lambda: GPTBigCodeAttention(GPTBigCodeConfig(n_embd=64, n_head=4), layer_idx=0), 1),
}


@pytest.mark.parametrize("name", PACKED_ATTENTIONS)
def test_packed_qkv(
    fuse: Callable[..., Any],
    in_vllm: Callable[..., Any],
    loader: Callable[..., Any],
    attention_calls: Callable[[nn.Module], None],
    attention_facts: Callable[..., ModuleFacts],
    name: str,
) -> None:
    make, kv_heads = PACKED_ATTENTIONS[name]
    module = drawn(make())
    arguments: dict[str, Any] = {"hidden_states": X, "attention_mask": None}
    if name == "phi3":
        arguments["position_embeddings"] = ROTARY
    attention_calls(module)
    fused = fuse(PackedQKV(), module, facts=attention_facts(4, kv_heads, 16), **arguments)
    module.config._attn_implementation = "eager"
    weights, expected = weights_of(module), module(**arguments)[0]
    packed = fused.specs[0].name

    def run(**changes: Any) -> float:
        applied = fused.apply(loader(weights, **changes))
        assert type(getattr(applied, packed)).__name__ == "QKVParallelLinear"
        return difference(applied(**arguments)[0], expected)

    assert in_vllm(run) < TOLERANCE
    assert in_vllm(lambda: run(shards={packed: {"q": "q", "k": "v", "v": "k"}})) > 10 * TOLERANCE
    if name != "phi3":
        assert in_vllm(lambda: run(skip=("bias",))) > 10 * TOLERANCE


class WeightlessNorm(nn.Module):
    def forward(self, x):
        return x * (x.pow(2).mean(-1, keepdim=True) + 0.1).pow(-0.5)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaRMSNorm(64, 0.1),
    "gemma": lambda: Gemma2RMSNorm(64, 0.1),
    "olmo": lambda: Olmo2RMSNorm(64, 0.1),
    "weightless": WeightlessNorm,
}
INPUTS = {
    "tokens": X,
    "heads": torch.randn(1, 5, 3, 64, generator=torch.Generator().manual_seed(3)),
    "heads-transposed": torch.randn(1, 5, 3, 64, generator=torch.Generator().manual_seed(3)).transpose(1, 2),
}


@pytest.mark.parametrize("shape", INPUTS)
@pytest.mark.parametrize("name", NORMS)
def test_rms_norm(
    fuse: Callable[..., Any], in_vllm: Callable[..., Any], loader: Callable[..., Any], name: str, shape: str
) -> None:
    module, given = drawn(NORMS[name]()), INPUTS[shape]
    weights, expected = weights_of(module), module(given)
    fused = fuse(RMSNorm(), module, given)

    def run(weights: dict[str, torch.Tensor], skip: tuple[str, ...] = (), eps: float | None = None) -> float:
        norm = fused.apply(loader(weights, skip=skip))
        if eps is not None:
            norm.variance_epsilon = eps
        return difference(norm(given.clone()), expected)

    assert in_vllm(run, weights) < TOLERANCE
    assert in_vllm(run, weights, (), 0.0) > 10 * TOLERANCE, "eps matters"
    if weights:
        assert in_vllm(run, {"weight": weights["weight"] + 1}) > 10 * TOLERANCE, "the offset matters"
        assert in_vllm(run, weights, ("weight",)) > 10 * TOLERANCE, "the weight matters"
