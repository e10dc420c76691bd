"""Experts that run as they are written, behind one opaque operation: their loops follow the data, which no compiler can.

In: a module of experts, with its weights or on meta. Out: a module that is called as it is, also within a compiled graph. The
operation finds its layer by name in vLLM's forward context, as vLLM's own opaque layers do.
"""

from __future__ import annotations

import inspect
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
        self._forward = inspect.unwrap(type(written).forward)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the experts give, of the shape of the hidden states [..., hidden]; ids and weights are [tokens, k]."""
        hidden, ids, weights = (args[place] if isinstance(place, int) else kwargs[place] for place in self._places)
        out: Tensor = torch.ops.moe_runner.written_experts(hidden, ids, weights, self.prefix)
        return out

    def run(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The call itself, outside of any graph."""
        values = dict(zip(self._places, (hidden, ids, weights), strict=True))
        args = [values[place] for place in sorted(place for place in values if isinstance(place, int))]
        kwargs = {place: value for place, value in values.items() if isinstance(place, str)}
        out: Tensor = self._forward(self.written, *args, **kwargs)
        return out


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
