"""Shared experts as vLLM's runner calls them: one module of hidden states, which holds nothing itself.

In: a `SharedSpec` and the block whose children they are. Out: a module that gives, of [tokens, hidden], what is added to the routed
experts: the share of a tensor-parallel rank, which the runner sums over ranks with that of the routed ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_runner.specs import SharedSpec


class SharedExperts(nn.Module):
    """Calls the children of `block`, which stay its children: their parameters keep their names, and layers that take their places count.

    Args:
        is_counted: whether this rank gives what it computes. Of what is whole on every rank one alone does.
        reduce: sums over tensor-parallel ranks; None where there is one.
    """

    def __init__(
        self,
        spec: SharedSpec,
        block: nn.Module,
        *,
        is_counted: bool = True,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.reduce = reduce
        self.spec = spec
        self.is_counted = is_counted
        self.__dict__["block"] = block  # no child: the module tree would have a cycle, and each parameter two names

    def forward(self, hidden: Tensor) -> Tensor:
        """What is added for hidden states [tokens, hidden], of that shape."""
        given = hidden.unsqueeze(0) if self.spec.ndim == 3 else hidden
        block: Any = self.__dict__["block"]
        out: Tensor = getattr(block, self.spec.child)(given)
        if self.spec.gate:
            out = torch.sigmoid(getattr(block, self.spec.gate)(given)) * out
        out = out.view(hidden.shape)
        return out if self.is_counted else torch.zeros_like(out)

    def over_ranks(self, hidden: Tensor) -> Tensor:
        """The sum of what all tensor-parallel ranks give for hidden states that they all have."""
        mine: Tensor = self(hidden)
        return mine if self.reduce is None else self.reduce(mine)


class Scaled(nn.Module):
    """The factor of a router on what the routed experts give: in float16 vLLM's runner divides the shared ones by it instead.

    It commutes with the sum over ranks, and says so as vLLM asks for it.
    """

    reduce_commutative = True

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, routed: Tensor) -> Tensor:
        """`routed` times the factor."""
        return routed * self.factor


def build_shared(spec: SharedSpec, block: nn.Module) -> SharedExperts:
    """The shared experts of `block` on this rank."""
    from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_reduce

    is_counted = not spec.whole or get_tensor_model_parallel_rank() == 0
    return SharedExperts(spec, block, is_counted=is_counted, reduce=tensor_model_parallel_all_reduce)
