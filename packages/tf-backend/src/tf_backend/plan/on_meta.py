"""A rewritten module on meta, with stand-ins for the layers that its plan gives it: does it run, and give what it should in shape?

In: a module, the layers, the forward that will run. Out: nothing, or `NotFusable`. A merged projection gives views of one tensor where each
projection gave a tensor of its own: a forward that asks for another layout than such a view has would fail while serving.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from ast_rewrite import CompiledRewrite
from torch import nn
from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.layers.linear import qkv_split_sizes
from vllm_layers_bridge.layers.rotary import Rotary
from vllm_layers_bridge.seams.leaf import holder_name
from vllm_layers_bridge.specs import ActivationAndMulSpec, LayerSpec, MergedLinearSpec, QKVLinearSpec, RotarySpec

from tf_backend.generated import derive
from tf_backend.plan.observe import ModuleCall


def require_runs(
    module: nn.Module, layers: Sequence[LayerSpec], rewrite: CompiledRewrite, call: ModuleCall, calls: int
) -> None:
    """Run a rewritten forward as it was called, on one rank, with `calls` of attention.

    Raises:
        NotFusable: it fails where the original does not, or returns other shapes.
    """
    known = MergedLinearSpec | QKVLinearSpec | ActivationAndMulSpec | RotarySpec
    if not all(isinstance(layer, known) for layer in layers):
        return  # a fusion from elsewhere brings layers that nothing is known of
    try:
        expected = copied(module, type(module))(*fresh(call.args), **fresh(call.kwargs))
    except Exception:  # the module's own code, which is told elsewhere
        return
    made = copied(module, derive(type(module), rewrite))
    for layer in layers:
        if isinstance(layer, ActivationAndMulSpec):
            made._modules[layer.name] = HalfProduct()
            continue
        if isinstance(layer, RotarySpec):
            made._modules[layer.name] = Rotary(layer)
            continue
        assert isinstance(layer, MergedLinearSpec | QKVLinearSpec)
        like = module.get_submodule(layer.sources[0].child)
        for source in layer.sources:
            made._modules.pop(source.child, None)
        made._modules[layer.name] = meta_linear(layer.in_features, sum(s.size for s in layer.sources), like)
        if isinstance(layer, QKVLinearSpec):
            made.__dict__[layer.sizes_attribute] = qkv_split_sizes(layer, 1)
    if calls > 1:
        made._modules.update({holder_name(at): nn.Module() for at in range(calls)})
    try:
        found = made(*fresh(call.args), **fresh(call.kwargs))
    except Exception as error:
        first = str(error).split("\n", 1)[0]
        raise NotFusable(f"its rewritten forward does not run: {type(error).__name__}: {first}") from error
    if shapes(found) != shapes(expected):
        raise NotFusable("its rewritten forward returns other shapes")


def copied(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """A shallow copy whose own attributes, lists, parameters and children can be changed."""
    local: nn.Module = kind.__new__(kind)
    held = {key: copy.copy(value) if type(value) in (list, dict, set) else value for key, value in vars(module).items()}
    local.__dict__.update(held)
    for registry in ("_modules", "_parameters"):
        local.__dict__[registry] = dict(module.__dict__[registry])
    return local


class HalfProduct(nn.Module):
    """Stands for a fused activation: gives half the width that it takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return first * second


def meta_linear(in_features: int, out_features: int, like: nn.Module | None) -> nn.Linear:
    weight = getattr(like, "weight", None)
    dtype = weight.dtype if isinstance(weight, torch.Tensor) else None
    return nn.Linear(in_features, out_features, getattr(like, "bias", None) is not None, device="meta", dtype=dtype)


def fresh(value: Any) -> Any:
    """The containers anew, so that what a forward leaves in them can be told; tensors and other objects as they are."""
    if type(value) in (tuple, list):
        return type(value)(fresh(item) for item in value)
    return {key: fresh(item) for key, item in value.items()} if type(value) is dict else value


def shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, tuple | list):
        return [shapes(item) for item in value]
    if isinstance(value, dict):
        return {key: shapes(item) for key, item in value.items()}
    return type(value).__name__
