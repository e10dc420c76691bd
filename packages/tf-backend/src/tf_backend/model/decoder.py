"""The compiled part: a wrapper of our own around the transformers decoder, decorated once.

Imports vLLM: only code that applies a plan imports this module. In: the decoder whose layers were built from a plan. Out: hidden states.
The wrapper is importable and nothing is done to transformers' own classes, so that another model in the process sees none of it.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm_layers_bridge.seams.attention import AttentionTurns
from vllm_layers_bridge.seams.row import Row

from tf_backend.model.stage import Passage


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": -1, "inputs_embeds": 0, "received": 0})
class Decoder(nn.Module):
    """Runs `base` on one flat row of tokens.

    Args:
        base: the transformers decoder, e.g. a ``LlamaModel``.
        passage: where hidden states come in and go out on a pipeline stage; None where there is one stage.
        row: where modules find the positions of their tokens; None where none asks.
        sends: whether another stage follows.
    """

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        prefix: str = "",
        base: nn.Module,
        passage: Passage | None = None,
        row: Row | None = None,
        sends: bool = False,
    ) -> None:
        super().__init__()
        self.base = base
        self.passage = passage or Passage()
        self.row = row
        self.sends = sends
        self.turns = tuple(module.turns for module in base.modules() if isinstance(module, AttentionTurns))

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
        received: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Last hidden state [tokens, hidden] of tokens [tokens] at `positions` [tokens]; or hidden states for the next stage.

        `received` are the hidden states [tokens, hidden] of the stage before, in the place of tokens.
        """
        if received is not None:
            self.passage.received = received[None]
            input_ids, inputs_embeds = None, received
        for turns in self.turns:
            turns.start()
        if self.row is not None:
            self.row.positions = positions
        output = self.base(
            input_ids=None if input_ids is None else input_ids[None],
            inputs_embeds=None if inputs_embeds is None else inputs_embeds[None],
            position_ids=positions[None],
            use_cache=False,
            return_dict=True,
        )
        for turns in self.turns:
            turns.finish()
        sent = self.passage.sent if self.sends else output.last_hidden_state
        self.passage.received = self.passage.sent = None  # nothing is kept until the next step
        if self.row is not None:
            self.row.positions = None
        assert sent is not None
        hidden: torch.Tensor = sent[0]
        return hidden
