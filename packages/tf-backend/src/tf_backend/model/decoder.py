"""The compiled part: a wrapper of our own around the transformers decoder, decorated once.

Imports vLLM: only code that applies a plan imports this module. In: the decoder whose layers were built from a plan. Out: hidden states.
The wrapper is importable and nothing is done to transformers' own classes, so that another model in the process sees none of it.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": -1, "inputs_embeds": 0})
class Decoder(nn.Module):
    """Runs `base` on one flat row of tokens.

    Args:
        base: the transformers decoder, e.g. a ``LlamaModel``.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Last hidden state [tokens, hidden] of tokens [tokens] at `positions` [tokens]."""
        output = self.base(
            input_ids=None if input_ids is None else input_ids[None],
            inputs_embeds=None if inputs_embeds is None else inputs_embeds[None],
            position_ids=positions[None],
            use_cache=False,
            return_dict=True,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden
