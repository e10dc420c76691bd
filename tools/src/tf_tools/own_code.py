"""A tiny checkpoint that brings its own Python code, as models on a hub do before transformers has them.

In: a folder. Out: config.json with an `auto_map`, the two files that it names, and weights. Attention goes through transformers' attention
interface; queries are scaled and the MLP is written with a functional activation, so that no class of the library computes the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from tf_tools.checkpoints import SIZES, scale_weights

__all__ = ["write_own_code"]

_CONFIGURATION = """
from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""

_MODELING = """
from torch import nn
from torch.nn.functional import silu
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from .configuration_own import OwnConfig


class OwnMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


class OwnAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = 0.3
        self.attention_dropout = 0.0
        self.is_causal = True
        width = config.num_key_value_heads * self.head_dim
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.key = nn.Linear(config.hidden_size, width, bias=False)
        self.value = nn.Linear(config.hidden_size, width, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query = self.query(hidden_states).view(hidden_shape).transpose(1, 2)
        key = self.key(hidden_states).view(hidden_shape).transpose(1, 2)
        value = self.value(hidden_states).view(hidden_shape).transpose(1, 2)
        cos, sin = position_embeddings
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0, **kwargs)
        return self.out(output.reshape(*input_shape, -1).contiguous()), weights


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.mlp = OwnMLP(config)
            layer.self_attn = OwnAttention(config, index)
        self.post_init()
"""


def write_own_code(folder: Path, *, seed: int = 0) -> Path:
    """Write the checkpoint into `folder`, which must not exist, and return it."""
    folder.mkdir(parents=True)
    (folder / "configuration_own.py").write_text(_CONFIGURATION)
    (folder / "modeling_own.py").write_text(_MODELING)
    cls: Any = get_class_from_dynamic_module("modeling_own.OwnForCausalLM", str(folder))
    config = cls.config_class(**{**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}})
    config.architectures = ["OwnForCausalLM"]
    config.auto_map = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    config.save_pretrained(folder)
    model = cls(config).float()
    scale_weights(model, seed=seed)
    held = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    assert all(tensor.dtype is torch.float32 for tensor in held.values())
    return folder
