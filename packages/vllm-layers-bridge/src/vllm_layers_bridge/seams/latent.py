"""Latent attention: what all heads' keys and values are made of is handed to vLLM's MLA layer, which caches nothing else.

In: an `AttentionSpec` with its `LatentSpec`, the linear that makes keys and values. Out: a layer that takes queries as transformers lays
them out, the shared features in the place of the keys and the latent in the place of the values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_layers_bridge.errors import NotBuildable, WrongLayout
from vllm_layers_bridge.specs import AttentionSpec, LatentSpec


class LatentLayer(nn.Module):
    """Queries [1, heads, tokens, head_dim], shared features [1, 1, tokens, rope] and latent [1, 1, tokens, rank] to values.

    They are [1, tokens, heads, value_head_dim]. The last `rope` features of a query meet the shared ones, those before them what the linear
    makes of the latent.

    Raises:
        WrongLayout: sizes other than those.
    """

    def __init__(self, attention: nn.Module, latent: LatentSpec, value_head_dim: int) -> None:
        super().__init__()
        self.attention = attention
        self._rank, self._rope, self._value_width = latent.rank, latent.rope, value_head_dim

    def forward(self, query: torch.Tensor, shared: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        _, heads, tokens, width = query.shape
        if shared.shape != (1, 1, tokens, self._rope) or latent.shape != (1, 1, tokens, self._rank):
            raise WrongLayout(
                f"latent attention is given features {tuple(shared.shape)} and a latent {tuple(latent.shape)} for {tokens} tokens; "
                f"expected [1, 1, {tokens}, {self._rope}] and [1, 1, {tokens}, {self._rank}]."
            )
        output: torch.Tensor = self.attention(
            query.transpose(1, 2).reshape(tokens, heads, width),
            latent.reshape(tokens, self._rank),
            shared.reshape(tokens, 1, self._rope),
            output_shape=torch.Size((tokens, heads * self._value_width)),
        )
        return output.view(1, tokens, heads, self._value_width)


def build_latent_layer(
    spec: AttentionSpec,
    latent: LatentSpec,
    heads: int,
    projection: nn.Module,
    prefix: str,
    cache_config: Any,
    quant_config: Any,
) -> LatentLayer:
    """vLLM's MLA layer for `heads` heads of this rank, which reads, and where it expands past tokens calls, `projection`.

    Raises:
        NotBuildable: the linear gives other heads than this rank's, or vLLM's layer does not take these sizes.
    """
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.attention.mla_attention import get_mla_dims

    nope = spec.head_dim - latent.rope
    rows = heads * (nope + spec.value_head_dim)
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, torch.Tensor) or tuple(weight.shape) != (rows, latent.rank):
        shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else "no weight"
        raise NotBuildable(f"the projection of `{prefix}` has {shape} on this rank, expected ({rows}, {latent.rank}).")
    dims = get_mla_dims(get_current_vllm_config().model_config)
    theirs = (dims.kv_lora_rank, dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim)
    ours = (latent.rank, nope, latent.rope, spec.value_head_dim)
    if theirs != ours:
        raise NotBuildable(
            f"vLLM prepares the latent attention of `{prefix}` for sizes {theirs}; the model's own are {ours}."
        )
    try:
        layer = MLAAttention(
            num_heads=heads,
            scale=spec.scale,
            qk_nope_head_dim=nope,
            qk_rope_head_dim=latent.rope,
            v_head_dim=spec.value_head_dim,
            q_lora_rank=None,
            kv_lora_rank=latent.rank,
            kv_b_proj=projection,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=prefix,
        )
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise NotBuildable(
            f"vLLM cannot build the latent attention of `{prefix}` ({spec}, {latent}): {error}"
        ) from error
    setattr(projection, "return_bias", True)  # noqa: B010  MLAAttention alone calls it now, and takes the first of two results
    return LatentLayer(layer, latent, spec.value_head_dim)
