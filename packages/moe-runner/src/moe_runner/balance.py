"""What vLLM's balancer of experts moves between ranks, and what it would leave behind.

In: a layer with its weights loaded and processed. Out: names of tensors that hold something of each expert and would stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moe_runner.layer import RoutedExperts

_DEPTH = 3
"""A kernel's settings hold descriptions of weights, and those hold tensors."""


def left_behind(layer: RoutedExperts) -> tuple[str, ...]:
    """Tensors of a layer with one entry for each expert of this rank that are not moved with their experts.

    vLLM moves the parameters of its module of expert weights. A copy that a kernel keeps of a bias, say, in another type, would go on
    serving the expert that was there before. An entry that is the same for all experts may stay.
    """
    runner: Any = layer.runner
    routed = runner.routed_experts
    moved = {_storage(weight) for weight in routed.get_expert_weights()}
    if routed.e_score_correction_bias is not None:  # of logical experts
        moved.add(_storage(routed.e_score_correction_bias))
    held = [*routed.named_parameters(), *_tensors(routed.quant_method, "", _DEPTH)]
    return tuple(
        dict.fromkeys(
            name
            for name, tensor in held
            if tensor.ndim
            and tensor.shape[0] == routed.local_num_experts
            and _storage(tensor) not in moved
            and not torch.equal(tensor, tensor[:1].expand_as(tensor))
        )
    )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(holder: object, path: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    values = getattr(holder, "__dict__", {})
    values = values | values.get("_parameters", {}) | values.get("_buffers", {})
    for name, value in values.items():
        where = f"{path}.{name}" if path else name
        if isinstance(value, Tensor):
            yield where, value
        elif depth and not isinstance(value, nn.Module | type):
            yield from _tensors(value, where, depth - 1)
