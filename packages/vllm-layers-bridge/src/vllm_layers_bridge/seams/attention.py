"""The attention seam: transformers' attention interface in front, vLLM's paged attention behind.

In: an `AttentionSpec` and the module that calls the interface. Out: that module gets a vLLM `Attention` as a child, and the
interface function registered under `INTERFACE` finds it there. Query, key and value arrive as transformers lays them out,
[1, heads, tokens, head_dim]; vLLM takes [tokens, heads * head_dim].
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from vllm_layers_bridge.errors import NotBuildable, WrongLayout
from vllm_layers_bridge.layers.heads import heads_per_rank
from vllm_layers_bridge.seams.latent import LatentLayer, build_latent_layer
from vllm_layers_bridge.seams.leaf import turn_name
from vllm_layers_bridge.specs import AttentionSpec, LatentSpec

INTERFACE = "tf_backend"
"""Attention implementation under which the seam is registered with transformers."""

CHILD = "engine_attention"
"""Name of the child through which a module reaches its vLLM attention layer."""


class AttentionCall(nn.Module):
    """Stands for the module in one of its several calls of the interface, and holds the layer of that call."""


class Turns:
    """Counts the runs of a module in one forward of the model; `total` of them are expected."""

    def __init__(self) -> None:
        self.total = 0
        self.taken = 0

    def start(self) -> None:
        """Before the model runs."""
        self.taken = 0

    def take(self) -> int:
        """The number of this run, from 0. Raises WrongLayout where it was not expected."""
        at = self.taken
        if at >= self.total:
            raise WrongLayout(
                f"a module attends more than {self.total} times in one forward of the model, as was planned."
            )
        self.taken = at + 1
        return at

    def finish(self) -> None:
        """After the model ran. Raises WrongLayout where runs are missing."""
        if self.taken != self.total:
            raise WrongLayout(
                f"a module attends {self.taken} times in one forward of the model, and not {self.total} times, as was planned."
            )


class AttentionTurns(nn.Module):
    """The layers of a module that attends in several runs of one forward: each run reaches its own, in the order of planning.

    What runs the model calls `turns.start()` before it and `turns.finish()` after it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns()

    def add(self, layer: nn.Module) -> None:
        """One more run, after those that are known."""
        self.add_module(turn_name(self.turns.total), layer)
        self.turns.total += 1

    def next(self) -> nn.Module:
        """The layer of this run."""
        return self.get_submodule(turn_name(self.turns.take()))


def attention_interface(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the engine's KV cache.

    Mask, scale, window, soft cap and sinks are the layer's own, read when the model was planned: what is passed here was checked then.
    Heads narrower than the layer's are padded with zeros, which changes no score and no other value.

    Args:
        module: the module that calls, which holds the vLLM layer.
        query: [1, heads, tokens, head_dim]; `key` and `value` likewise with key-value heads.

    Returns:
        ([1, tokens, heads, value_head_dim], None).

    Raises:
        WrongLayout: more than one row, keys that are not those of the queries' own tokens, or more runs of the module than planned.
    """
    shape, width = query.shape, value.shape[-1]
    if len(shape) != 4 or shape[0] != 1 or key.shape[2] != shape[2]:
        raise WrongLayout(
            f"`{type(module).__name__}` calls attention with query {tuple(shape)} and key {tuple(key.shape)}; "
            "expected [1, heads, tokens, head_dim] for both: the engine has all sequences in one row, and past keys in its cache."
        )
    held = getattr(module, CHILD)
    layer = held.next() if isinstance(held, AttentionTurns) else held
    if isinstance(layer, LatentLayer):
        return layer(query, key, value), None
    heads, tokens = shape[1], shape[2]
    size = getattr(layer, "head_size", None)
    if not (size is None or size == shape[3] == key.shape[3] == width):
        query, key, value = _padded(query, size), _padded(key, size), _padded(value, size)
    flat = [part.transpose(1, 2).reshape(tokens, -1) for part in (query, key, value)]
    output: torch.Tensor = layer(*flat)
    output = output.view(1, tokens, heads, -1)
    return output if output.shape[3] == width else output[..., :width], None


def _padded(heads: torch.Tensor, size: int) -> torch.Tensor:
    """Heads [1, heads, tokens, width] with zeros up to `size`."""
    missing = size - heads.shape[3]
    return nn.functional.pad(heads, (0, missing)) if missing > 0 else heads


def register_interface() -> None:
    """Make `INTERFACE` known to transformers; no mask is ever built for it, since it has no mask function."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(INTERFACE, attention_interface)


def attach_attention(
    module: nn.Module,
    spec: AttentionSpec,
    prefix: str,
    *,
    tensor_parallel: int,
    cache_config: Any,
    quant_config: Any,
    holder: str = "",
    turn: int | None = None,
) -> nn.Module:
    """Give `module` the vLLM attention layer of `spec`, and memory to the sinks of this rank, to be loaded like any parameter.

    Args:
        prefix: full name of the layer; vLLM wants exactly one integer in it.
        tensor_parallel: ranks over which heads are split; key-value heads are repeated when ranks outnumber them.
        cache_config: the engine's. A window that it holds for the whole model gives way to the layer's own.
        holder: name of a child of `module` that is to hold the layer, made where it is not there; empty where the module itself does.
        turn: which run of the module the layer is for, from 0, where it attends in several; attach them in this order.

    Raises:
        NotBuildable: the platform's attention does not take these sizes, or took another window than the layer's.
    """
    from vllm.model_executor.layers.attention import Attention

    if spec.sliding_window is None and cache_config is not None and cache_config.sliding_window is not None:
        cache_config = dataclasses.replace(cache_config, sliding_window=None)
    heads, kv_heads = heads_per_rank(spec.num_heads, spec.num_kv_heads, tensor_parallel)
    extra = {} if spec.sinks is None else {"sinks": _local_sinks(module, spec.sinks, heads)}
    try:
        layer = Attention(
            num_heads=heads,
            head_size=spec.cache_head_dim,
            scale=spec.scale,
            num_kv_heads=kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            logits_soft_cap=spec.logits_soft_cap,
            per_layer_sliding_window=spec.sliding_window,
            prefix=prefix,
            **extra,
        )
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise NotBuildable(f"vLLM cannot build the attention of `{prefix}` ({spec}): {error}") from error
    if layer.sliding_window != spec.sliding_window:
        raise NotBuildable(
            f"vLLM gave `{prefix}` a window of {layer.sliding_window}; the model's own is {spec.sliding_window}."
        )
    backend = getattr(layer, "attn_backend", None)  # not every platform asks it when the layer is built
    if backend is not None and not backend.supports_head_size(spec.cache_head_dim):
        raise NotBuildable(
            f"vLLM's {backend.get_name()} attention, given to `{prefix}`, takes no heads of {spec.cache_head_dim}."
        )
    if holder and holder not in module._modules:
        module.add_module(holder, AttentionCall())
    built: nn.Module = layer
    _hold(module.get_submodule(holder), built, turn)
    return built


def attach_latent_attention(
    module: nn.Module,
    spec: AttentionSpec,
    latent: LatentSpec,
    prefix: str,
    *,
    tensor_parallel: int,
    cache_config: Any,
    quant_config: Any,
    turn: int | None = None,
) -> nn.Module:
    """Give `module`, whose forward hands shared features and latent to the interface, vLLM's latent attention, see `build_latent_layer`.

    The arguments are those of `attach_attention`; the child `latent.projection` must be the layer that runs.
    """
    heads, _ = heads_per_rank(spec.num_heads, spec.num_kv_heads, tensor_parallel)
    projection = module.get_submodule(latent.projection)
    layer = build_latent_layer(spec, latent, heads, projection, prefix, cache_config, quant_config)
    _hold(module, layer, turn)
    return layer


def _hold(owner: nn.Module, layer: nn.Module, turn: int | None) -> None:
    if turn is None:
        setattr(owner, CHILD, layer)
        return
    if turn == 0:
        setattr(owner, CHILD, AttentionTurns())
    turns = owner.get_submodule(CHILD)
    assert isinstance(turns, AttentionTurns)
    assert turns.turns.total == turn, "layers are attached in the order of their turns"
    turns.add(layer)


def _local_sinks(module: nn.Module, name: str, heads: int) -> nn.Parameter:
    """The parameter `name` of `module`, on the current device, for the heads of this rank; the engine's layer reads it where it lies."""
    whole = module.get_parameter(name)
    if whole.shape[0] == heads and hasattr(whole, "weight_loader"):
        return whole  # of another call of this module
    local = nn.Parameter(torch.empty(heads, dtype=whole.dtype), requires_grad=False)

    def load(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank

        start = get_tensor_model_parallel_rank() * heads if heads < loaded.shape[0] else 0
        parameter.data.copy_(loaded[start : start + heads])

    local.weight_loader = load  # type: ignore[attr-defined]
    setattr(module, name, local)
    return local
