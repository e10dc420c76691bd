"""Apply a plan: the skeleton on meta becomes a model of vLLM layers on a device, with weights not yet loaded.

In: a planned skeleton and the engine's config. Out: the same module tree, fused. The only step that imports vLLM.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import moe_runner
import torch
from ast_rewrite import CompiledRewrite
from moe_runner import ExpertsSpec, RouterSpec, WrittenExpertsSpec
from torch import nn
from transformers import PreTrainedModel
from vllm_layers_bridge.layers import BuildContext, build
from vllm_layers_bridge.layers.linear import qkv_split_sizes
from vllm_layers_bridge.layers.position_table import PositionTable
from vllm_layers_bridge.layers.shards import shard_parameter
from vllm_layers_bridge.seams.attention import (
    CHILD,
    INTERFACE,
    attach_attention,
    attach_latent_attention,
    register_interface,
)
from vllm_layers_bridge.seams.leaf import turn_name
from vllm_layers_bridge.seams.row import ROW, Row
from vllm_layers_bridge.specs import LayerSpec, MergedLinearSpec, PositionTableSpec, QKVLinearSpec

from tf_backend.generated import derive
from tf_backend.model.buffers import initialise, restore_buffers
from tf_backend.model.stage import lies_in
from tf_backend.plan.counted import counting_modules
from tf_backend.plan.positions import Tabled
from tf_backend.plan.schema import AttentionPlan, ModulePlan, Plan


@dataclass(frozen=True, slots=True)
class Engine:
    """What applying needs of the engine, read once from its config."""

    tensor_parallel: int
    cache_config: Any
    quant_config: Any
    device: torch.device
    positions: int
    """Longest sequence that is served."""


def apply(
    plan: Plan,
    rewrites: dict[str, CompiledRewrite],
    model: PreTrainedModel,
    engine: Engine,
    prefix: str = "",
    tabled: Mapping[str, Tabled] | None = None,
    absent: frozenset[str] = frozenset(),
    row: Row | None = None,
) -> None:
    """Build every layer of `plan` into `model`.

    Args:
        rewrites: compiled forwards by variant id, derived in this process; their hashes must be the plan's.
        prefix: full name under which the engine knows the model, usually empty.
        tabled: by name, the modules that tables of positions are built from.
        absent: modules that are on other pipeline stages, stand-ins in their places.
        row: where modules that count tokens find their positions.
    """
    _check_rewrites(plan, rewrites)
    for name in counting_modules(plan.modules, plan.variants):
        if row is not None and not lies_in(name, absent):
            setattr(model.get_submodule(name), ROW, row)
    context = BuildContext(engine.quant_config)
    for module_plan in plan.modules:
        if lies_in(module_plan.name, absent):
            continue
        if module_plan.action == "replace" and isinstance(module_plan.layers[0], PositionTableSpec):
            table = _position_table(module_plan, model, (tabled or {})[module_plan.name], engine)
            _set(model, module_plan.name, table)
        elif module_plan.action == "replace":
            _replace(module_plan, model, context, prefix, engine.device)
        elif module_plan.action == "rewrite":
            _rewrite(module_plan, rewrites, model, context, engine.tensor_parallel, prefix)
        _localize(module_plan, model)
    if plan.head is not None and plan.head.linear.tied_to is not None and plan.head.linear.name not in absent:
        head = model.get_submodule(plan.head.linear.name)
        tied = model.get_submodule(plan.head.linear.tied_to)
        _set(model, plan.head.linear.name, head.tie_weights(tied))
    register_interface()
    model.config._attn_implementation = INTERFACE
    for attention in plan.attention:
        if lies_in(attention.module, absent):
            continue
        _attach(attention, model, engine, prefix)
    restore_buffers(model, tuple(name for name in plan.buffers if not lies_in(name, absent)), engine.device)
    _materialize(model, engine.device)


def _attach(plan: AttentionPlan, model: nn.Module, engine: Engine, prefix: str) -> None:
    owner, name = model.get_submodule(plan.module), _join(prefix, _layer_name(plan))
    engines: dict[str, Any] = {
        "tensor_parallel": engine.tensor_parallel,
        "cache_config": engine.cache_config,
        "quant_config": engine.quant_config,
        "turn": plan.turn,
    }
    if plan.latent is not None:
        attach_latent_attention(owner, plan.spec, plan.latent, name, **engines)
    else:
        attach_attention(owner, plan.spec, name, holder=plan.holder, **engines)


def _check_rewrites(plan: Plan, rewrites: dict[str, CompiledRewrite]) -> None:
    for variant in plan.variants:
        if variant.rewritten_sha256 is not None and rewrites[variant.id].sha256 != variant.rewritten_sha256:
            raise ValueError(f"the rewrite of {variant.cls} in this process is not the one that was planned")


def _replace(plan: ModulePlan, model: nn.Module, context: BuildContext, prefix: str, device: torch.device) -> None:
    (spec,) = plan.layers
    name = _join(prefix, plan.name)
    if isinstance(spec, ExpertsSpec):
        correction = None
        if spec.routing is not None and spec.routing.correction:
            correction = _tensor_on(model, spec.routing.correction, device)
        shared = None
        if spec.shared is not None:
            shared = moe_runner.build_shared(spec.shared, model.get_submodule(spec.shared.block))
        _set(model, plan.name, moe_runner.build_experts(spec, name, context.quant_config, correction, shared))
    elif isinstance(spec, RouterSpec):
        _set(model, plan.name, moe_runner.build_router(spec, model.get_submodule(plan.name), name))
    elif isinstance(spec, WrittenExpertsSpec):
        _set(model, plan.name, moe_runner.keep_experts(spec, model.get_submodule(plan.name), name))
    else:
        _set(model, plan.name, build(spec, name, context))


def _tensor_on(model: nn.Module, name: str, device: torch.device) -> torch.Tensor:
    """A parameter or buffer on `device`, made there in its own place if it is not: whoever is handed it has what will be loaded."""
    owner, _, leaf = name.rpartition(".")
    holder = model.get_submodule(owner)
    found = holder._parameters.get(leaf)
    if found is None:
        buffer = holder.get_buffer(leaf)
        if buffer.is_meta:
            buffer = holder._buffers[leaf] = torch.empty_like(buffer, device=device)
        return buffer
    if found.is_meta:
        found = nn.Parameter(torch.empty_like(found, device=device), requires_grad=False)
        holder._parameters[leaf] = found
    return found


def _position_table(plan: ModulePlan, model: PreTrainedModel, tabled: Tabled, engine: Engine) -> PositionTable:
    spec = tabled.spec
    real = copy.deepcopy(tabled.module)
    initialise(model, plan.name, real, tuple(real._buffers), engine.device)
    return PositionTable(real, tabled.calls, engine.positions, spec.constant_below, spec.beyond)


def _rewrite(
    plan: ModulePlan,
    rewrites: dict[str, CompiledRewrite],
    model: nn.Module,
    context: BuildContext,
    tensor_parallel: int,
    prefix: str,
) -> None:
    assert plan.variant is not None
    module = model.get_submodule(plan.name)
    for spec in plan.layers:
        assert not isinstance(spec, ExpertsSpec | WrittenExpertsSpec | RouterSpec)
        for child in _sources(spec):
            delattr(module, child)
        setattr(module, spec.name, build(spec, _join(prefix, f"{plan.name}.{spec.name}"), context))
        if isinstance(spec, QKVLinearSpec):
            setattr(module, spec.sizes_attribute, qkv_split_sizes(spec, tensor_parallel))
    module.__class__ = derive(type(module), rewrites[plan.variant])


def _localize(plan: ModulePlan, model: nn.Module) -> None:
    """Give a module the sizes of this rank, and its runs of the parameters that stay where they are."""
    for size in plan.sizes:
        setattr(model.get_submodule(plan.name), size.name, size.local)
    for shard in plan.shards:
        path, _, leaf = f"{plan.name}.{shard.name}".rpartition(".")
        owner = model.get_submodule(path)
        whole = owner.get_parameter(leaf)
        setattr(owner, leaf, shard_parameter(whole.shape, whole.dtype, shard.axis, shard.pieces))


def _sources(spec: LayerSpec) -> tuple[str, ...]:
    if isinstance(spec, MergedLinearSpec | QKVLinearSpec):
        return tuple(dict.fromkeys(source.child for source in spec.sources))
    return ()


def _layer_name(attention: AttentionPlan) -> str:
    turn = "" if attention.turn is None else turn_name(attention.turn)
    return ".".join(part for part in (attention.module, attention.holder, CHILD, turn) if part)


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Give memory to what stayed as transformers wrote it."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
