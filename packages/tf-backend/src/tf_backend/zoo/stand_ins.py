"""Plain torch layers that compute what a spec says, whole on one rank: in the place of the engine's where there is none.

In: a spec, the module whose children it takes over. Out: a layer with those children's weights in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from moe_runner import AnyExpertsSpec, ExpertsSpec, Place, SharedExperts
from torch import nn
from vllm_layers_bridge.layers.rotary import Rotary
from vllm_layers_bridge.specs import (
    ActivationAndMulSpec,
    LayerSpec,
    LinearSpec,
    MergedLinearSpec,
    QKVLinearSpec,
    RMSNormSpec,
    RotarySpec,
    Source,
)


class NoStandIn(Exception):
    """There is no plain layer for a spec; `str` names its kind."""


def stand_in(spec: LayerSpec | AnyExpertsSpec, module: nn.Module) -> nn.Module:
    """The layer that `spec` puts into `module`, or in its place, with `module`'s own weights.

    Raises:
        NoStandIn: the kind of spec is not known here.
    """
    match spec:
        case MergedLinearSpec() | QKVLinearSpec():
            return _merged(spec.in_features, spec.sources, module)
        case LinearSpec() if spec.name:
            child = module.get_submodule(spec.name)
            return _merged(
                spec.in_features, (Source(spec.name, None, spec.out_features, None, spec.transposed),), module, child
            )
        case ActivationAndMulSpec():
            return _ActivationAndMul(spec.activation)
        case RMSNormSpec():
            return _RMSNorm(spec, module)
        case RotarySpec():
            return Rotary(spec)
        case _:
            raise NoStandIn(str(spec.__struct_config__.tag).replace("_", " "))


def experts_stand_in(spec: ExpertsSpec, block: nn.Module, name: str) -> nn.Module:
    """The experts `name` of `block` as they are written, with its shared experts added as the engine's runner does.

    Raises:
        NoStandIn: they are no direct child of the block.
    """
    if "." in name or spec.shared is None:
        raise NoStandIn("experts")
    return _WithShared(block.get_submodule(name), SharedExperts(spec.shared, block), spec.arguments[0])


def _merged(
    in_features: int, sources: tuple[Source, ...], module: nn.Module, only: nn.Module | None = None
) -> nn.Linear:
    children = [only or module.get_submodule(source.child) for source in sources]
    weights = [_part(child.get_parameter("weight"), source) for child, source in zip(children, sources, strict=True)]
    biases = [
        _part(bias, source)
        for child, source in zip(children, sources, strict=True)
        if isinstance(bias := getattr(child, "bias", None), torch.Tensor)
    ]
    layer = nn.Linear(in_features, sum(len(weight) for weight in weights), bias=bool(biases))
    with torch.no_grad():
        layer.weight.copy_(torch.cat(weights))
        if biases:
            layer.bias.copy_(torch.cat(biases))
    return layer


def _part(tensor: torch.Tensor, source: Source) -> torch.Tensor:
    """What of a child's tensor goes in: [out, ...]."""
    if source.transposed and tensor.ndim == 2:
        tensor = tensor.t()
    return tensor if source.rows is None else tensor[source.rows[0] : source.rows[1]]


class _WithShared(nn.Module):
    def __init__(self, experts: nn.Module, shared: nn.Module, hidden: Place) -> None:
        super().__init__()
        self.experts, self.shared, self.hidden = experts, shared, hidden

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Hidden states [..., hidden], with what else the experts take."""
        hidden: torch.Tensor = args[self.hidden] if isinstance(self.hidden, int) else kwargs[self.hidden]
        out: torch.Tensor = self.experts(*args, **kwargs)
        beside: torch.Tensor = self.shared(hidden.reshape(-1, hidden.shape[-1]))
        return out + beside.view_as(out)


class _ActivationAndMul(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "silu": nn.functional.silu,
            "gelu": nn.functional.gelu,
            "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
        }
        if name not in functions:
            raise NoStandIn(f"activation {name}")
        self.function = functions[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 2 n] to [..., n]."""
        gate, up = x.chunk(2, dim=-1)
        return self.function(gate) * up


class _RMSNorm(nn.Module):
    def __init__(self, spec: RMSNormSpec, module: nn.Module) -> None:
        super().__init__()
        self.spec = spec
        own = next(module.parameters(), None)
        self.weight = None if own is None else nn.Parameter(own.detach().clone(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Over the last axis."""
        value = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.spec.eps)
        return value if self.weight is None else value * (self.weight + self.spec.offset)
