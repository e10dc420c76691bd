"""Loading experts: tensors as the model holds them, all experts in one or one each, go into the merged weights of vLLM's runner.

In: the runner's parameters, a tensor, what it holds. Out: the part of this rank, in place. Each expert is loaded for itself,
so that experts of other ranks are left out and the features between the projections are split over ranks by vLLM's own loader. Where
there are redundant experts, every copy of an expert is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_runner._layouts import halves, of_expert
from moe_runner._ranks import copies_of
from moe_runner.specs import ExpertsSpec, ExpertTensor, Half

LOADER = "load_experts"
"""Attribute of a parameter of the runner: a function of that parameter, a tensor and its `ExpertTensor`.

It does not hold the parameter. The engine replaces one whose weights it packs, and a parameter that holds itself stays in memory until
the collector runs, which the engine puts off.
"""

_SHARDS: dict[Half, str] = {"gate": "w1", "down": "w2", "up": "w3"}


def parameter_of(tensor: ExpertTensor) -> str:
    """Name, within `RoutedExperts`, of the parameter that the tensor goes to."""
    merged = "w2" if tensor.halves == ("down",) else "w13"
    return f"runner.routed_experts.{merged}_{'bias' if tensor.bias else 'weight'}"


class ExpertLoader:
    """Loads the experts of one layer.

    Args:
        interleaved: whether rows of gate and up alternate in the runner's weights.
        routed: vLLM's module that holds them.
        copies: for each expert the physical ones that hold it; one of its own id where none are given.
    """

    def __init__(
        self, spec: ExpertsSpec, interleaved: bool, routed: Any, copies: Sequence[Sequence[int]] | None = None
    ) -> None:
        self.spec = spec
        self.interleaved = interleaved
        self.routed = routed
        self.copies = copies or copies_of(spec.num_experts, 0)

    def attach(self) -> None:
        """Give each parameter the attribute `LOADER`."""
        for name, parameter in self.routed.named_parameters():
            setattr(parameter, LOADER, partial(self.load, name))

    def load(self, name: str, parameter: Tensor, value: Tensor, tensor: ExpertTensor) -> None:
        """Copy what of `value` belongs to this rank into `parameter`."""
        experts = range(self.spec.num_experts) if tensor.expert is None else (tensor.expert,)
        for expert in experts:
            one = of_expert(value, tensor, expert, self.spec.num_experts)
            parts = dict(zip(tensor.halves, halves(one, tensor), strict=True))
            for physical in self.copies[expert]:
                if self.interleaved and "down" not in parts:
                    self._load_interleaved(parameter, parts, physical)
                else:
                    self._load_halves(name, parameter, parts, tensor, physical)

    def _load_halves(
        self, name: str, parameter: Tensor, parts: dict[Half, Tensor], tensor: ExpertTensor, physical: int
    ) -> None:
        for half, part in parts.items():
            if half == "down" and tensor.bias and self._is_not_first_of_split():
                part = torch.zeros_like(part)  # each rank would add it to its share of the sum
            shard = "w1" if half == "up" and not self.spec.gate.gated else _SHARDS[half]
            self.routed.weight_loader(parameter, part, name, shard, physical)

    def _load_interleaved(self, parameter: Tensor, parts: dict[Half, Tensor], physical: int) -> None:
        """Rows that alternate, gate first; vLLM's loader knows only one half after the other."""
        local = self.routed.expert_map_manager.map_global_to_local(physical)
        if local == -1:
            return
        config = self.routed.moe_config
        for half, part in parts.items():
            size = part.shape[0] // config.tp_size
            mine = part.narrow(0, size * config.tp_rank, size)
            target = parameter.data[local][(0 if half == "gate" else 1) :: 2]
            if target.ndim == 2:
                target = target[: mine.shape[0], : mine.shape[1]]
            target[: mine.shape[0]].copy_(mine)

    def _is_not_first_of_split(self) -> bool:
        return bool(self.routed.moe_config.tp_rank)
