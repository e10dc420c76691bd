"""The level `numbers`: each rewritten module against its original, in float32 on the CPU, without an engine.

In: an entry. Out: a `Verdict`. The tiny model gets random weights and runs once on random tokens; what each rewritten module was given
there, its rewrite is given too, with plain torch layers in the place of the engine's. One instance stands for each variant.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from moe_runner import ExpertsSpec
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm_layers_bridge.layers.linear import qkv_split_sizes
from vllm_layers_bridge.nested import tensors_in
from vllm_layers_bridge.specs import QKVLinearSpec

from tf_backend.capabilities import Capabilities
from tf_backend.generated import derive
from tf_backend.model.skeleton import model_class
from tf_backend.plan.modules import consumed_children
from tf_backend.plan.planner import Planned, make_plan
from tf_backend.plan.schema import ModulePlan, Parallel, Plan
from tf_backend.zoo.plan_level import NotBuildable, small_skeleton
from tf_backend.zoo.rows import Verdict
from tf_backend.zoo.stand_ins import NoStandIn, experts_stand_in, stand_in
from tf_backend.zoo.types import Entry

TOLERANCE = 1e-5
"""Norm of the difference over norm of the original, in float32."""

INTERFACE = "tf_backend_zoo"
_TOKENS = 11


@dataclass(slots=True)
class _Call:
    """What a module was given and gave, in the run of the original."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    has_returned: bool = field(default=False)


def numbers_verdict(entry: Entry, capabilities: Capabilities) -> Verdict:
    """Compare each rewritten variant of the tiny model of `entry` with its original."""
    try:
        skeleton = small_skeleton(entry)
    except NotBuildable as error:
        return Verdict("skipped", str(error))
    planned = make_plan(skeleton, Parallel(), capabilities)
    model = drawn_model(skeleton)
    chosen = _one_of_each_variant(planned)
    calls, failure = _run(model, {plan.name for plan in chosen})
    worst, compared, left = 0.0, 0, {}
    for plan in chosen:
        module, call = model.get_submodule(plan.name), calls.get(plan.name)
        variant = planned.plan.variant(plan.variant or "")
        if call is None or not call.has_returned:
            left[variant.class_name] = f"did not run ({failure})" if failure else "did not run"
            continue
        try:
            with torch.no_grad(), _attention(model):
                found = _fused(module, plan, planned)(*_own(call.args), **_own(call.kwargs))
        except NoStandIn as error:
            left[variant.class_name] = f"no plain layer stands for {error}"
            continue
        except Exception as error:  # the rewritten forward itself: it does not run where the original does
            first = " ".join(str(error).split())[:200]
            return Verdict(
                "wrong", f"`{plan.name}` ({variant.class_name}) fails: {type(error).__name__}: {first}", compared
            )
        gap = difference(found, call.output)
        worst, compared = max(worst, gap), compared + 1
        if not gap <= TOLERANCE:
            fusions = ", ".join(fusion.name for fusion in variant.fusions)
            return Verdict(
                "wrong",
                f"`{plan.name}` ({variant.class_name}, {fusions}) differs by {gap:.2g} of its norm",
                compared,
                gap,
            )
    reason = "; ".join(f"{name}: {why}" for name, why in left.items())
    return Verdict("equal" if compared else "skipped", reason, compared, worst)


@torch.no_grad()
def drawn_model(skeleton: PreTrainedModel) -> PreTrainedModel:
    """A model in memory like `skeleton`, with weights of such a size that every part matters; the same for the same names."""
    config = copy.deepcopy(skeleton.config)
    torch.manual_seed(0)
    model: PreTrainedModel = (
        model_class(config)._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    )
    for name, parameter in model.named_parameters():
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        fresh = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        is_vector = parameter.ndim < 2 or "bias" in name.rpartition(".")[2]
        parameter.copy_(parameter + fresh * 0.25 if is_vector else fresh * 0.15)
        parameter.requires_grad_(False)
    return model


def difference(found: Any, expected: Any) -> float:
    """Norm of the difference over norm of `expected`, the largest over all tensors in the two; infinite where they are not alike."""
    one, other = list(tensors_in(found)), list(tensors_in(expected))
    if len(one) != len(other) or any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(one, other, strict=True)):
        return float("inf")
    return max((_gap(a, b) for a, b in zip(one, other, strict=True)), default=float("inf"))


def _gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else float("inf")
    a, b = found.double(), expected.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, torch.zeros_like(a), a - b).norm()
    scale = torch.where(b.isfinite(), b, torch.zeros_like(b)).norm()
    return float(gap / scale) if scale > 0 else float(gap)


def _one_of_each_variant(planned: Planned) -> list[ModulePlan]:
    chosen: dict[str, ModulePlan] = {}
    for plan in planned.plan.modules:
        if plan.variant is not None and plan.action != "keep":
            chosen.setdefault(plan.variant, plan)
    return list(chosen.values())


def _run(model: PreTrainedModel, names: set[str]) -> tuple[dict[str, _Call], str]:
    """The first call of each of `names` in one run of the model; and how the run ended, when it failed."""
    calls: dict[str, _Call] = {}
    running: dict[str, _Call] = {}
    handles = []
    for name in names:
        module = model.get_submodule(name)

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            if name not in calls:
                calls[name] = running[name] = _Call(_own(args), _own(kwargs))

        def leave(_: nn.Module, args: tuple[Any, ...], output: Any, name: str = name) -> None:
            call = running.pop(name, None)
            if call is not None:
                call.output, call.has_returned = _own(output), True

        handles += [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]
    tokens = torch.randint(3, model.get_input_embeddings().weight.shape[0], (1, _TOKENS))
    failure = ""
    try:
        with torch.no_grad(), _attention(model):
            model(input_ids=tokens, position_ids=torch.arange(_TOKENS)[None], use_cache=False)
    except Exception as error:  # the model's own code
        failure = f"the model fails: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    finally:
        for handle in handles:
            handle.remove()
    return calls, failure


def _fused(module: nn.Module, plan: ModulePlan, planned: Planned) -> nn.Module:
    """What `plan` makes of `module`, of plain layers."""
    if plan.action == "replace":
        return stand_in(plan.layers[0], module)
    kind = derive(type(module), planned.rewrites[plan.variant or ""])
    fused: nn.Module = kind.__new__(kind)
    fused.__dict__.update(module.__dict__)
    fused.__dict__["_modules"] = dict(module._modules)
    for attention in planned.plan.attention:
        if attention.module == plan.name and attention.holder:
            fused._modules[attention.holder] = nn.Module()
    for name, experts in _with_shared(plan.name, planned.plan):
        fused._modules[name] = experts_stand_in(experts, fused, name)
    for spec in plan.layers:
        fused._modules[spec.name] = stand_in(spec, module)
        if isinstance(spec, QKVLinearSpec):
            fused.__dict__[spec.sizes_attribute] = qkv_split_sizes(spec, 1)
    for spec in plan.layers:
        for child in consumed_children(spec):
            if child not in {layer.name for layer in plan.layers}:
                fused._modules.pop(child, None)
    return fused


def _with_shared(block: str, plan: Plan) -> Iterator[tuple[str, ExpertsSpec]]:
    """The child of a block whose runner adds the block's shared experts, if there is one."""
    for module in plan.modules:
        for layer in module.layers:
            if isinstance(layer, ExpertsSpec) and layer.shared is not None and layer.shared.block == block:
                yield module.name.removeprefix(f"{block}."), layer


@contextmanager
def _attention(model: PreTrainedModel) -> Iterator[None]:
    """Have `model` call plain attention where it would call transformers': it asks nothing of the module that calls."""
    ALL_ATTENTION_FUNCTIONS.register(INTERFACE, plain_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(INTERFACE, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    before = model.config._attn_implementation
    model.config._attn_implementation = INTERFACE
    try:
        yield
    finally:
        model.config._attn_implementation = before
        for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            type(registry)._global_mapping.pop(INTERFACE, None)


def plain_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """([batch, tokens, heads, value_head_dim], None) for query [batch, heads, tokens, head_dim]: scaled, masked, softmax."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:
        mask = attention_mask[..., : key.shape[2]]
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def _own(value: Any) -> Any:
    """A copy whose tensors nobody else writes to."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(_own(item) for item in value)
    if type(value) is dict:
        return {key: _own(item) for key, item in value.items()}
    return value
