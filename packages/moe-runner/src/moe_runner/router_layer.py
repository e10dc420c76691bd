"""A router that gives logits and chooses nothing, in the place of one that did: its runner chooses.

In: a `RouterSpec` and the module whose place it takes. Out: a module that is called as it is. It holds the same tensors under the same
names, but for those that the engine's linear layer for gates holds; vLLM is imported when there are such.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_runner.routers import RouterSpec

_GATE = "engine_gate"


class RouterLogits(nn.Module):
    """Returns the logits [tokens, experts] in the place of each value that the router returned: of the weights, which are the runner's.

    Args:
        spec: what the router computes.
        router: the module whose place it takes.
        gate: what gives the logits of hidden states [tokens, hidden], where it is not done here.
    """

    def __init__(self, spec: RouterSpec, router: nn.Module, gate: nn.Module | None = None) -> None:
        super().__init__()
        self._parameters.update(router._parameters)
        self._buffers.update(router._buffers)
        self._non_persistent_buffers_set |= router._non_persistent_buffers_set
        self._modules.update(router._modules)
        self.spec = spec
        self._weight = tuple(spec.weight.split("."))
        self._bias = tuple(spec.bias.split(".")) if spec.bias else ()
        self._child = tuple(spec.child.split(".")) if spec.child else ()
        self._dtype = torch.float32
        if gate is not None:
            for path in filter(None, (self._weight, self._bias)):
                delattr(_at(self, path[:-1]), path[-1])
            self._dtype = gate.get_parameter(
                "weight"
            ).dtype  # on some platforms the weight is packed and gone after loading
            setattr(self, _GATE, gate)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        hidden = args[self.spec.hidden] if isinstance(self.spec.hidden, int) else kwargs[self.spec.hidden]
        hidden = hidden.reshape(-1, hidden.shape[-1])
        if self._child:
            logits = _at(self, self._child)(hidden)
        elif self.spec.engine_gate:
            logits = self._of_gate(hidden)
        else:
            weight = _at(self, self._weight)
            bias = _at(self, self._bias).view(-1) if self._bias else None
            dtype = torch.float32 if self.spec.float32 else weight.dtype
            logits = _linear(hidden, weight, bias, dtype)
        return (logits,) * self.spec.outputs

    def _of_gate(self, hidden: Tensor) -> Tensor:
        gate: Any = getattr(self, _GATE)
        if not self.spec.float32:
            return gate(hidden.to(self._dtype))  # type: ignore[no-any-return]
        if hidden.dtype == torch.float32 != self._dtype:  # the kernels round what is given to the type of the weight
            return _linear(hidden, gate.weight, gate.bias, torch.float32)
        return gate(hidden)  # type: ignore[no-any-return]


def build_router(spec: RouterSpec, router: nn.Module, prefix: str) -> RouterLogits:
    """Build the layer, with the engine's linear layer for gates where the spec says so: on the current device, not loaded.

    Where logits are of float32 and the platform has no kernel that makes them of 16 bits, that layer holds its weight in float32.

    Args:
        prefix: full name, unique in the model.
    """
    if not spec.engine_gate:
        return RouterLogits(spec, router)
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    experts, hidden = router.get_parameter(spec.weight).shape
    gate = GateLinear(
        hidden,
        experts,
        bias=bool(spec.bias),
        out_dtype=torch.float32 if spec.float32 else None,
        force_fp32_compute=spec.float32,
        prefix=f"{prefix}.{_GATE}",
        return_bias=False,
    )
    return RouterLogits(spec, router, gate)


def gate_parameters(spec: RouterSpec) -> dict[str, str]:
    """Tensors of a router, as the model names them, that its `RouterLogits` holds under other names -> those."""
    if not spec.engine_gate:
        return {}
    named = {spec.weight: "weight", spec.bias: "bias"}
    return {old: f"{_GATE}.{new}" for old, new in named.items() if old}


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _at(module: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        module = getattr(module, part)
    return module
