"""Cosines and sines of rotary embeddings: whether each stands twice in them, asked of the module that made them.

In: a model on meta and its observation. Out: an answer for any tensor that a module was called with. The very tensor must have come out
of a module without parameters that was given positions; that module is run with its real buffers over positions near and far.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedModel
from vllm_layers_bridge.specs import Pairing

from tf_backend.model.buffers import non_persistent_buffers
from tf_backend.plan.observe import Made, Observation
from tf_backend.plan.positions import StandIn, on_cpu

_POSITIONS = (*range(64), 101, 1009, 4093, 10007, 65537, 1000003)
"""Entries are functions of a position and a frequency: two columns that agree at all of these are one function."""


class AnglesMade:
    """What is known of the tensors that modules of positions made in one run."""

    def __init__(self, model: PreTrainedModel, seen: Observation) -> None:
        self._model = model
        self._made = {id(tensor): (made, at) for made in seen.made for at, tensor in enumerate(made.tensors)}
        self._values: dict[int, tuple[torch.Tensor, ...]] = {}

    def holds_twice(self, tensor: torch.Tensor, pairing: Pairing) -> bool:
        """Whether `tensor`, [1, tokens, 2 n], holds each of n values twice, n places apart or side by side, whatever the positions."""
        known = self._made.get(id(tensor))
        if known is None:
            return False
        made, at = known
        if id(made) not in self._values:
            self._values[id(made)] = self._evaluated(made)
        values = self._values[id(made)]
        if at >= len(values) or values[at].ndim != 3 or values[at].shape[-1] % 2:
            return False
        value = values[at]
        first, second = value.chunk(2, dim=-1) if pairing == "halves" else (value[..., ::2], value[..., 1::2])
        return value.shape[-1] == tensor.shape[-1] and torch.equal(first, second)

    def _evaluated(self, made: Made) -> tuple[torch.Tensor, ...]:
        """What the module really makes of `_POSITIONS`; nothing where it cannot be told."""
        real = self._real(made.module)
        if real is None:
            return ()
        try:
            return made.call.run(real, torch.tensor([_POSITIONS]))
        except Exception:  # the module's own code, with positions that it may not be made for
            return ()

    def _real(self, name: str) -> nn.Module | None:
        module = self._model.get_submodule(name)
        if isinstance(module, StandIn):
            return copy.deepcopy(module.real[0])
        own = {f"{name}.{leaf}" for leaf, _ in module.named_buffers()}
        if not own <= set(non_persistent_buffers(self._model)):
            return None
        return on_cpu(self._model, name, module)
