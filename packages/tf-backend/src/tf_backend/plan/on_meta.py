"""A rewritten module on meta, with stand-ins for the layers that its plan gives it: does it run, and give what it should in shape?

In: a module, the layers, the forward that will run. Out: nothing, or `NotFusable`. A merged projection gives views of one tensor where each
projection gave a tensor of its own: a forward that asks for another layout than such a view has would fail while serving.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from ast_rewrite import CompiledRewrite
from torch import nn
from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.layers.linear import qkv_split_sizes
from vllm_layers_bridge.layers.rotary import Rotary
from vllm_layers_bridge.nested import tensors_in
from vllm_layers_bridge.seams.leaf import VALUE_WIDTH, holder_name
from vllm_layers_bridge.specs import (
    ActivationAndMulSpec,
    AttentionSpec,
    LayerSpec,
    MergedLinearSpec,
    QKVLinearSpec,
    RotarySpec,
)

from tf_backend.generated import derive
from tf_backend.plan.observe import ModuleCall

LENGTHS = (1, 2, 3, 8, 64, 1024, 8192)
"""Tokens that a forward is run with beside those that it was called with, where it may take another path for another number of them."""


def require_runs(
    module: nn.Module,
    layers: Sequence[LayerSpec],
    rewrite: CompiledRewrite,
    call: ModuleCall,
    attention: Sequence[AttentionSpec],
    *,
    asks_for_sizes: bool = False,
) -> None:
    """Run a rewritten forward as it was called, on one rank, with these calls of attention; with `asks_for_sizes` at other lengths too.

    Raises:
        NotFusable: it fails where the original does not, or returns other shapes.
    """
    known = MergedLinearSpec | QKVLinearSpec | ActivationAndMulSpec | RotarySpec
    if not all(isinstance(layer, known) for layer in layers):
        return  # a fusion from elsewhere brings layers that nothing is known of
    for args, kwargs in _calls(call, LENGTHS if asks_for_sizes else ()):
        try:
            expected = copied(module, type(module))(*fresh(args), **fresh(kwargs))
        except Exception:  # the module's own code, which is told elsewhere
            continue
        try:
            found = _made(module, layers, rewrite, attention)(*fresh(args), **fresh(kwargs))
        except Exception as error:
            first = str(error).split("\n", 1)[0]
            raise NotFusable(f"its rewritten forward does not run: {type(error).__name__}: {first}") from error
        if shapes(found) != shapes(expected):
            raise NotFusable("its rewritten forward returns other shapes")


def _made(
    module: nn.Module, layers: Sequence[LayerSpec], rewrite: CompiledRewrite, attention: Sequence[AttentionSpec]
) -> nn.Module:
    """The module with its new forward, and something of the right shape for each layer."""
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
    prepare_calls(made, attention)
    return made


def prepare_calls(made: nn.Module, attention: Sequence[AttentionSpec]) -> None:
    """What a rewritten forward asks its module for in these calls of attention: a holder for each of several, the width of a value."""
    if len(attention) > 1:
        made._modules.update({holder_name(at): nn.Module() for at in range(len(attention))})
    elif attention:
        made.__dict__[VALUE_WIDTH] = attention[0].value_head_dim


def _calls(call: ModuleCall, lengths: Sequence[int]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The call as it was made, and with other numbers of tokens: the second axis of its first tensor of three."""
    yield call.args, call.kwargs
    rows = (tensor for tensor in tensors_in((call.args, call.kwargs)) if tensor.ndim == 3)
    tokens = next((int(tensor.shape[1]) for tensor in rows), None)
    for length in lengths if tokens is not None else ():
        yield _resized(call.args, tokens, length), _resized(call.kwargs, tokens, length)


def _resized(value: Any, old: int | None, new: int) -> Any:
    if isinstance(value, torch.Tensor):
        shape = [new if size == old else size for size in value.shape]
        return value if shape == list(value.shape) else torch.empty(shape, dtype=value.dtype, device=value.device)
    if type(value) in (tuple, list):
        return type(value)(_resized(item, old, new) for item in value)
    return {key: _resized(item, old, new) for key, item in value.items()} if type(value) is dict else value


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
