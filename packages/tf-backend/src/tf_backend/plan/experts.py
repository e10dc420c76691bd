"""Experts of sparse blocks: which block they belong to, what they compute, whether the engine's runner takes them.

In: a model on meta, its observation, capabilities. Out: for each module of experts an `ExpertsSpec` that the runner computes exactly,
or the reason why the block cannot be served. Routing stays in the model: its blocks say which experts each token goes to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import moe_runner
import msgspec
from moe_runner import AnyExpertsSpec, Experts, ExpertsSpec, SparseBlock, WrittenExpertsSpec
from torch import nn
from transformers import PreTrainedModel

from tf_backend.capabilities import Capabilities
from tf_backend.plan.observe import ModuleCall, Observation
from tf_backend.plan.places import place_of_class
from tf_backend.plan.schema import ExpertsPlan, Parallel, Refusal

_REMEDY = "Serve it with `--model-impl vllm`, if vLLM has an implementation of its own."


@dataclass(slots=True)
class FoundExperts:
    """What was found of sparse blocks in a model.

    specs: for each module of experts, by full name, what the runner computes in its place, or that it runs as it is written.
    plans: one for each of them, for people.
    blocks: names of all sparse blocks.
    """

    specs: dict[str, AnyExpertsSpec] = field(default_factory=dict)
    plans: list[ExpertsPlan] = field(default_factory=list)
    refusals: dict[type[nn.Module], Refusal] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)


def find_experts(
    model: PreTrainedModel, seen: Observation, capabilities: Capabilities, parallel: Parallel
) -> FoundExperts:
    """Look at every module of `model`; one refusal per class of blocks that cannot be served."""
    found = FoundExperts()
    readings: dict[Any, Experts] = {}
    for name, module in model.named_modules():
        call = seen.calls.get(name)
        block = moe_runner.recognize(module, call.args if call else (), call.kwargs if call else {})
        if block is None:
            continue
        found.blocks.append(name)
        try:
            for experts, spec in _specs(model, name, block, seen, readings, capabilities, parallel):
                found.specs[experts] = spec
                found.plans.append(_plan(name, experts, type(module), block, spec))
        except _NotServed as problem:
            found.refusals.setdefault(
                type(module),
                Refusal(
                    f"`{type(module).__name__}` is a sparse mixture-of-experts block ({block.describe()}), which is not served: "
                    f"{problem}",
                    name,
                    place_of_class(type(module)),
                    _REMEDY,
                ),
            )
    return found


class _NotServed(Exception):
    """Why a block cannot be served, as a clause."""


def _plan(name: str, experts: str, cls: type[nn.Module], block: SparseBlock, spec: AnyExpertsSpec) -> ExpertsPlan:
    what, outside = block.describe(), why_outside(block, spec)
    if isinstance(spec, WrittenExpertsSpec):
        return ExpertsPlan(
            name, experts, cls.__name__, what, "not known", "as written", spec.reason, why_outside=outside
        )
    return ExpertsPlan(name, experts, cls.__name__, what, f"{spec.gate}, as `{spec.runs_as}`", why_outside=outside)


def why_outside(block: SparseBlock, spec: AnyExpertsSpec) -> str:
    """The first fact that keeps the engine from choosing the experts of `block` itself; where there is no other, how they are called."""
    if isinstance(spec, WrittenExpertsSpec):
        return "the experts run as they are written"
    if block.num_scores != block.num_experts:
        return f"it chooses among {block.num_scores or 'an unknown number of'} scores for {block.num_experts} experts"
    if block.score is None:
        return "its scores are no softmax and no sigmoid of the router's logits, or more than one"
    if block.score == "sigmoid" and block.score_order == "after":
        return "it takes the sigmoid of what was chosen, and the engine's routers take it before they choose"
    return "its experts are called with ids and weights, and the logits do not reach them"


def _specs(
    model: PreTrainedModel,
    name: str,
    block: SparseBlock,
    seen: Observation,
    readings: dict[Any, Experts],
    capabilities: Capabilities,
    parallel: Parallel,
) -> Iterator[tuple[str, AnyExpertsSpec]]:
    """Modules in a block that are called with ids and weights and hold all of its experts, with what they become."""
    names = [f"{name}.{parameter}" if name else parameter for parameter in block.parameters]
    experts = _called_as_experts(model, name, seen, names)
    if experts is None or block.storage != "stacked parameters":
        raise _NotServed("its experts are no module that is called with the ids of experts and their weights")
    module, call = model.get_submodule(experts), seen.calls[experts]
    if len(call.signatures) > 1:
        raise _NotServed(f"`{experts}` is called in different ways")
    key = _key(module, call, block.num_experts)
    if key not in readings:
        readings[key] = moe_runner.read_experts(module, call.args, call.kwargs, num_experts=block.num_experts)
    reading = readings[key]
    try:
        if reading.spec is None:
            raise _NotServed(f"`{type(module).__name__}` cannot be read: {reading.reason}")
        yield experts, _runnable(_routed(reading.spec, block), capabilities, parallel)
    except _NotServed as problem:
        yield experts, _written(reading, str(problem), capabilities)


def _written(reading: Experts, reason: str, capabilities: Capabilities) -> WrittenExpertsSpec:
    """Experts as they are written, where that is known to be right: each token alone, in a place where loops may follow the data."""
    if not reading.tokenwise or reading.arguments is None:
        raise _NotServed(reason)
    if capabilities.platform != "cpu":
        raise _NotServed(f"{reason}; and as they are written they follow the data, which a CUDA graph cannot")
    return WrittenExpertsSpec(reading.arguments, reason)


def _called_as_experts(model: nn.Module, name: str, seen: Observation, parameters: list[str]) -> str | None:
    """The outermost module under `name` that holds all of `parameters` and is called as experts are."""
    parts = parameters[0].split(".")[:-1]
    start = name.count(".") + 1 if name else 0
    for end in range(start + 1, len(parts) + 1):
        path = ".".join(parts[:end])
        call = seen.calls.get(path)
        holds = all(parameter.startswith(f"{path}.") for parameter in parameters)
        if holds and call is not None and moe_runner.is_routed_call(call.args, call.kwargs):
            return path
    return None


def _routed(spec: ExpertsSpec, block: SparseBlock) -> ExpertsSpec:
    """What ids beyond the experts do matters only where the router gives any."""
    if block.num_scores == spec.num_experts:
        return msgspec.structs.replace(spec, null=None)
    if spec.null is None:
        scores = "an unknown number of" if block.num_scores is None else str(block.num_scores)
        raise _NotServed(
            f"it chooses among {scores} scores for {spec.num_experts} experts, and what the others do is not known"
        )
    return spec


def _runnable(spec: ExpertsSpec, capabilities: Capabilities, parallel: Parallel) -> ExpertsSpec:
    """The spec with the engine's name of its activation."""
    name = moe_runner.engine_activation(spec.gate, capabilities.moe_activations)
    if name is None:
        raise _NotServed(
            f"its experts compute {spec.gate}, for which the engine has no kernel; it has "
            f"{', '.join(capabilities.moe_activations)}"
        )
    multiple = capabilities.moe_size_multiple
    if spec.hidden_size % multiple:
        raise _NotServed(
            f"the engine's kernel takes hidden sizes that are multiples of {multiple}, and its is {spec.hidden_size}"
        )
    if parallel.experts and spec.num_experts < parallel.tensor:
        raise _NotServed(f"its {spec.num_experts} experts cannot be dealt out over {parallel.tensor} ranks")
    ranks = 1 if parallel.experts else parallel.tensor
    if spec.intermediate_size % ranks:
        raise _NotServed(f"{ranks} ranks do not divide the {spec.intermediate_size} features within its experts")
    if name == "swigluoai" and (spec.intermediate_size // ranks) % multiple:
        raise _NotServed(
            f"the engine's kernel for `{name}` takes multiples of {multiple} features within experts, and on a rank it has "
            f"{spec.intermediate_size // ranks}"
        )
    return msgspec.structs.replace(spec, runs_as=name)


def _key(module: nn.Module, call: ModuleCall, num_experts: int) -> Any:
    """Equal for instances that run the same code on tensors of the same shapes with the same plain values."""
    parts = []
    for name, inner in module.named_modules():
        shapes = tuple((key, None if p is None else tuple(p.shape)) for key, p in inner._parameters.items())
        plain = {key: repr(v) for key, v in vars(inner).items() if isinstance(v, bool | int | float | str | type(None))}
        parts.append((name, type(inner), shapes, tuple(sorted(plain.items())), id(getattr(inner, "config", None))))
    return tuple(parts), call.signature, num_experts
