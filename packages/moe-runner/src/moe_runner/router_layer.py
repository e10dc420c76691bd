"""A router that gives logits and chooses nothing, in the place of one that did: its runner chooses.

In: a `RouterSpec` and the module whose place it takes. Out: a module that is called as it is and holds its parameters, under their names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_runner.routers import RouterSpec


class RouterLogits(nn.Module):
    """Returns the logits [tokens, experts] in the place of each value that the router returned: of the weights, which are the runner's."""

    def __init__(self, spec: RouterSpec, router: nn.Module) -> None:
        super().__init__()
        self._parameters.update(router._parameters)
        self._buffers.update(router._buffers)
        self._non_persistent_buffers_set |= router._non_persistent_buffers_set
        self._modules.update(router._modules)
        self.spec = spec
        self._weight = tuple(spec.weight.split("."))
        self._bias = tuple(spec.bias.split(".")) if spec.bias else ()
        self._child = tuple(spec.child.split(".")) if spec.child else ()

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        hidden = args[self.spec.hidden] if isinstance(self.spec.hidden, int) else kwargs[self.spec.hidden]
        hidden = hidden.reshape(-1, hidden.shape[-1])
        if self._child:
            logits = _at(self, self._child)(hidden)
        else:
            weight = _at(self, self._weight)
            bias = _at(self, self._bias).view(-1) if self._bias else None
            dtype = torch.float32 if self.spec.float32 else weight.dtype
            logits = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        return (logits,) * self.spec.outputs


def _at(module: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        module = getattr(module, part)
    return module
