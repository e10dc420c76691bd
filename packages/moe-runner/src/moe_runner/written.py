"""Experts that run as they are written, behind one opaque operation: their loops follow the data, which no compiler can.

In: a module of experts, with its weights or on meta. Out: a module that is called as it is, also within a compiled graph. The
operation finds its layer by name in vLLM's forward context, as vLLM's own opaque layers do.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from moe_runner.specs import WrittenExpertsSpec


class WrittenExperts(nn.Module):
    """Runs `written` by the forward that its class was written with.

    Args:
        written: the experts. Its parameters are found below this child, `WRITTEN`.
        prefix: full name, unique in the model.
    """

    def __init__(self, spec: WrittenExpertsSpec, written: nn.Module, prefix: str) -> None:
        super().__init__()
        self.written = written
        self.prefix = prefix
        self._places = spec.arguments
        self._scores = spec.scores
        self._forward = inspect.unwrap(type(written).forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the experts give, of the shape of the hidden states [..., hidden]; ids and weights are [tokens, k].

        Of a whole block, called with its tokens: what it gives.
        """
        given = [args[place] if isinstance(place, int) else kwargs[place] for place in self._places]
        if len(given) == 1:
            out, scores = torch.ops.moe_runner.written_block(given[0], self._scores or 0, self.prefix)
            return out if self._scores is None else (out, scores)
        return torch.ops.moe_runner.written_experts(*given, self.prefix)

    def run(self, *given: Tensor) -> Any:
        """The call itself, outside of any graph."""
        values = dict(zip(self._places, given, strict=True))
        args = [values[place] for place in sorted(place for place in values if isinstance(place, int))]
        kwargs = {place: value for place, value in values.items() if isinstance(place, str)}
        return self._forward(self.written, *args, **kwargs)

    def run_block(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What a block gives, and the rows [tokens, scores] beside it, [tokens, 0] where there are none."""
        given = self.run(hidden)
        out, rows = given if self._scores is not None else (given, hidden.new_empty((math.prod(hidden.shape[:-1]), 0)))
        return out.clone() if out is hidden else out, rows.to(hidden.dtype)


WRITTEN = "written"


def keep_experts(spec: WrittenExpertsSpec, written: nn.Module, prefix: str) -> WrittenExperts:
    """Put `written` behind the operation, and make it known to vLLM under `prefix`."""
    from vllm.config import get_current_vllm_config

    layer = WrittenExperts(spec, written, prefix)
    context = get_current_vllm_config().compilation_config.static_forward_context
    if prefix in context:
        raise ValueError(f"there is a layer of the name `{prefix}` already")
    context[prefix] = layer
    return layer


@torch.library.custom_op("moe_runner::written_experts", mutates_args=())
def _written_experts(hidden: Tensor, ids: Tensor, weights: Tensor, prefix: str) -> Tensor:
    from vllm.forward_context import get_forward_context

    layer: Any = get_forward_context().no_compile_layers[prefix]
    out: Tensor = layer.run(hidden, ids, weights)
    return out


@_written_experts.register_fake
def _(hidden: Tensor, ids: Tensor, weights: Tensor, prefix: str) -> Tensor:
    return torch.empty_like(hidden)


@torch.library.custom_op("moe_runner::written_block", mutates_args=())
def _written_block(hidden: Tensor, scores: int, prefix: str) -> tuple[Tensor, Tensor]:
    from vllm.forward_context import get_forward_context

    layer: Any = get_forward_context().no_compile_layers[prefix]
    out: tuple[Tensor, Tensor] = layer.run_block(hidden)
    return out


@_written_block.register_fake
def _(hidden: Tensor, scores: int, prefix: str) -> tuple[Tensor, Tensor]:
    tokens = math.prod(hidden.shape[:-1])  # `Size.numel` would make a constant of it
    return torch.empty_like(hidden), hidden.new_empty((tokens, scores))
