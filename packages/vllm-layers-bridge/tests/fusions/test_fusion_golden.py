"""What becomes of classes of transformers: their source before and after, and the layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from ast_rewrite import FunctionSource
from torch import nn
from transformers import (
    Gemma2Config,
    Glm4Config,
    GPT2Config,
    GPTBigCodeConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.glm4.modeling_glm4 import Glm4Attention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_bigcode.modeling_gpt_bigcode import GPTBigCodeAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3Attention, Phi3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.smollm3.modeling_smollm3 import SmolLM3Attention
from vllm_layers_bridge.fusions import QKV, GatedMLP, ModuleFacts, PackedGatedMLP, PackedQKV, RMSNorm, Rotary

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
X = torch.empty(1, 5, 64, device="meta")
ROTARY = torch.empty(1, 5, 16, device="meta")


def test_packed_mlp(fuse: Callable[..., Any], golden: Callable[[str, str], None]) -> None:
    _compare(golden, fuse(PackedGatedMLP(), Phi3MLP(Phi3Config(pad_token_id=0, **SIZES)), X))


@pytest.mark.parametrize(("cls", "config"), [(LlamaMLP, LlamaConfig), (Gemma2MLP, Gemma2Config)])
def test_mlp(
    fuse: Callable[..., Any], golden: Callable[[str, str], None], cls: type[nn.Module], config: type[Any]
) -> None:
    _compare(golden, fuse(GatedMLP(), cls(config(**SIZES)), X))


@pytest.mark.parametrize(
    ("cls", "config"),
    [(Qwen3Attention, Qwen3Config(**SIZES)), (SmolLM3Attention, SmolLM3Config(no_rope_layers=[1, 0], **SIZES))],
)
def test_attention(
    fuse: Callable[..., Any],
    golden: Callable[[str, str], None],
    attention_calls: Callable[[nn.Module], None],
    attention_facts: Callable[..., ModuleFacts],
    cls: type[nn.Module],
    config: Any,
) -> None:
    texts = set()
    for layer in (0, 1):
        module = cls(config, layer_idx=layer)
        attention_calls(module)
        arguments = {"hidden_states": X, "position_embeddings": (ROTARY, ROTARY), "attention_mask": None}
        fused = fuse(QKV(), module, facts=attention_facts(4, 2, 16), **arguments)
        texts.add(fused.text)
    assert len(texts) == 1, "with and without rotary embedding, the same text"
    _compare(golden, fused)


@pytest.mark.parametrize(
    ("cls", "config", "kv_heads"),
    [
        (Phi3Attention, Phi3Config(pad_token_id=0, **SIZES), 2),
        (GPT2Attention, GPT2Config(n_embd=64, n_head=4), 4),
        (GPTBigCodeAttention, GPTBigCodeConfig(n_embd=64, n_head=4), 1),
    ],
)
def test_packed_attention(
    fuse: Callable[..., Any],
    golden: Callable[[str, str], None],
    attention_calls: Callable[[nn.Module], None],
    attention_facts: Callable[..., ModuleFacts],
    cls: type[nn.Module],
    config: Any,
    kv_heads: int,
) -> None:
    module = cls(config, layer_idx=0)
    attention_calls(module)
    arguments: dict[str, Any] = {"hidden_states": X, "attention_mask": None}
    if cls is Phi3Attention:
        arguments["position_embeddings"] = (ROTARY, ROTARY)
    _compare(golden, fuse(PackedQKV(), module, facts=attention_facts(4, kv_heads, 16), **arguments))


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [(LlamaRMSNorm, (64, 1e-5)), (Gemma2RMSNorm, (64, 1e-6)), (Olmo2RMSNorm, (64, 1e-6))],
)
def test_norm(
    fuse: Callable[..., Any], golden: Callable[[str, str], None], cls: type[nn.Module], arguments: tuple[Any, ...]
) -> None:
    fused = fuse(RMSNorm(), cls(*arguments), X)
    golden(f"{cls.__name__}.before.txt", FunctionSource.of(cls.forward).dedented)
    golden(f"{cls.__name__}.layers.json", _json(fused.specs))


def test_olmo2_norm_takes_the_configured_eps() -> None:
    assert Olmo2RMSNorm(64, Olmo2Config(rms_norm_eps=1e-3).rms_norm_eps).variance_epsilon == 1e-3


@pytest.mark.parametrize(
    ("cls", "config", "kv_heads"),
    [(LlamaAttention, LlamaConfig(**SIZES), 2), (Glm4Attention, Glm4Config(pad_token_id=0, **SIZES), 2)],
)
def test_rotary(
    fuse: Callable[..., Any],
    golden: Callable[[str, str], None],
    attention_calls: Callable[[nn.Module], None],
    cls: type[nn.Module],
    config: Any,
    kv_heads: int,
) -> None:
    module = cls(config, layer_idx=0)
    attention_calls(module)
    arguments = {"hidden_states": X, "position_embeddings": (ROTARY, ROTARY.clone()), "attention_mask": None}
    facts = ModuleFacts("attention", args=(), kwargs=arguments, holds_twice=lambda *_: True)
    _compare(golden, fuse(Rotary(), module, facts=facts, **arguments))


def _compare(golden: Callable[[str, str], None], fused: Any) -> None:
    name = type(fused.module).__name__
    golden(f"{name}.before.txt", FunctionSource.of(type(fused.module).forward).dedented)
    golden(f"{name}.after.txt", fused.text.split("\n", 2)[2])  # without the two lines that say where it comes from
    golden(f"{name}.layers.json", _json(fused.specs))


def _json(specs: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(specs), indent=2).decode() + "\n"
