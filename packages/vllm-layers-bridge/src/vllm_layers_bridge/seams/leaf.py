"""The attention interface as one node: what a traced forward calls in the place of an attention function.

In: meta tensors. Out: meta tensors of the shapes that an attention function gives. Planning registers it with transformers and names it as
a leaf when it traces; fusions recognise the call by it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VALUE_WIDTH = "engine_value_width"
"""Attribute of a module with latent attention: features of a value head."""


def attention_leaf(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """([batch, tokens, heads, value_head_dim], None) for `query` [batch, heads, tokens, head_dim]; computes nothing.

    Where `module` has `VALUE_WIDTH`, that is the width of a value head: it is given latents and no values.
    """
    width = getattr(module, VALUE_WIDTH, value.shape[3])
    shape = (query.shape[0], query.shape[2], query.shape[1], width)
    return torch.empty(shape, dtype=query.dtype, device=query.device), None


def holder_name(call: int) -> str:
    """Name of the child through which the `call`-th call of a module, from 0, reaches its own attention layer.

    No part of it between dots is a number: vLLM takes exactly one integer in the full name of a layer.
    """
    return f"attention_call_{call}"


def turn_name(turn: int) -> str:
    """Name of the child that holds the layer of the `turn`-th run of a module, from 0; no part of it is a number, see `holder_name`."""
    return f"turn_{turn}"
