"""Experts of sparse blocks: which block they belong to, what they compute, whether the engine's runner takes them.

In: a model on meta, its observation, capabilities. Out: for each module of experts an `ExpertsSpec` that the runner computes exactly,
or the reason why the block cannot be served; and where the engine has a router like the block's, the logits that it is given (`routing`).
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
from tf_backend.plan.observe import Observation
from tf_backend.plan.places import place_of_class
from tf_backend.plan.routing import Inside, Routers, same_code
from tf_backend.plan.schema import ExpertsPlan, Parallel, Refusal

_REMEDY = "Serve it with `--model-impl vllm`, if vLLM has an implementation of its own."


@dataclass(slots=True)
class FoundExperts:
    """What was found of sparse blocks in a model.

    specs: for each module of experts, by full name, what the runner computes in its place, or that it runs as it is written.
    plans: one for each of them, for people.
    blocks: names of all sparse blocks.
    beside: of those with shared experts, the child that these are.
    tokenwise: of those, the ones that were run on numbers and seen to treat each token alone. rows: what those runs gave.
    """

    specs: dict[str, AnyExpertsSpec] = field(default_factory=dict)
    plans: list[ExpertsPlan] = field(default_factory=list)
    refusals: dict[type[nn.Module], Refusal] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)
    beside: dict[str, str] = field(default_factory=dict)
    tokenwise: list[str] = field(default_factory=list)
    rows: dict[Any, moe_runner.RowsGiven | None] = field(default_factory=dict)


def find_experts(
    model: PreTrainedModel, seen: Observation, capabilities: Capabilities, parallel: Parallel
) -> FoundExperts:
    """Look at every module of `model`; one refusal per class of blocks that cannot be served."""
    found = FoundExperts()
    readings: dict[Any, Experts] = {}
    routers = Routers(model, seen, capabilities, parallel)
    for name, module in model.named_modules():
        call = seen.calls.get(name)
        block = moe_runner.recognize(module, call.args if call else (), call.kwargs if call else {})
        if block is None:
            continue
        found.blocks.append(name)
        if block.shared_experts is not None:
            found.beside[name] = block.shared_experts
        if call is None and seen.failure is not None:  # why the run ended before it is what is to be told
            continue
        try:
            for experts, spec in _specs(model, name, block, seen, readings, capabilities, parallel, found):
                inside: Inside | str = "the experts run as they are written"
                if isinstance(spec, ExpertsSpec):
                    inside = routers.inside(name, block, experts, spec)
                if isinstance(inside, Inside):
                    found.specs |= {experts: inside.experts, inside.router: inside.logits}
                elif not isinstance(spec, str):
                    found.specs[experts] = spec
                found.plans.append(_plan(name, experts, type(module), block, spec, inside))
        except _NotServed as problem:
            if seen.failure is not None and not seen.failure.lacks_data and _is_inside(seen.failure.module, name):
                continue  # what it fails with is to be told
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


def _is_inside(name: str, block: str) -> bool:
    return not block or name == block or name.startswith(f"{block}.")


class _NotServed(Exception):
    """Why a block cannot be served, as a clause."""


def _plan(
    name: str,
    experts: str,
    cls: type[nn.Module],
    block: SparseBlock,
    spec: ExpertsSpec | WrittenExpertsSpec | str,
    inside: Inside | str,
) -> ExpertsPlan:
    what, outside = block.describe(), inside if isinstance(inside, str) else ""
    if not isinstance(spec, ExpertsSpec):
        reason = spec if isinstance(spec, str) else spec.reason
        return ExpertsPlan(name, experts, cls.__name__, what, "not known", "as written", reason, why_outside=outside)
    plan = ExpertsPlan(name, experts, cls.__name__, what, f"{spec.gate}, as `{spec.runs_as}`", why_outside=outside)
    if isinstance(inside, str) or inside.experts.routing is None:
        return plan
    return msgspec.structs.replace(plan, routing="inside", router=str(inside.experts.routing.form))


def _specs(
    model: PreTrainedModel,
    name: str,
    block: SparseBlock,
    seen: Observation,
    readings: dict[Any, Experts],
    capabilities: Capabilities,
    parallel: Parallel,
    found: FoundExperts,
) -> Iterator[tuple[str, ExpertsSpec | WrittenExpertsSpec | str]]:
    """Modules in a block that are called as experts are and hold all of its experts, with what they become.

    A string is the reason why one that is called with rows stays where it is; its loops do not follow the data.
    """
    names = [f"{name}.{parameter}" if name else parameter for parameter in block.parameters]
    if block.storage == "module list":
        yield name, _listed(model.get_submodule(name), name, block, seen, capabilities)
        return
    experts, takes_rows = _called_as_experts(name, block, seen, names)
    if experts is None:
        raise _NotServed("its experts are no module that is called with the ids of experts and their weights")
    module, call = model.get_submodule(experts), seen.calls[experts]
    if len(call.signatures) > 1:
        raise _NotServed(f"`{experts}` is called in different ways")
    top_k = block.top_k if takes_rows else None
    key = (same_code(module, call), block.num_experts, top_k)
    if key not in readings:
        readings[key] = moe_runner.read_experts(
            module, call.args, call.kwargs, num_experts=block.num_experts, top_k=top_k
        )
    reading = readings[key]
    if takes_rows:
        rows = _read_rows(model, name, experts, block, seen, found.rows)
        if rows is None or not rows.tokenwise:
            raise _NotServed(
                "it gives its experts the rows of each of them, and is not seen to keep those of one token together"
            )
        found.tokenwise.append(name)
        try:
            if rows.counts != {top_k}:
                raise _NotServed("how many rows of a token its experts are given is not known")
            if reading.spec is None:
                raise _NotServed(f"`{type(module).__name__}` cannot be read: {reading.reason}")
            yield experts, _runnable(reading.spec, capabilities, parallel)
        except _NotServed as problem:
            yield experts, str(problem)
        return
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


def _listed(
    module: nn.Module, name: str, block: SparseBlock, seen: Observation, capabilities: Capabilities
) -> WrittenExpertsSpec:
    """A block with a list of experts, which run one after another on the tokens that chose them: it runs whole, as it is written."""
    call = seen.calls.get(name)
    read = moe_runner.read_block(module, call.args, call.kwargs, block) if call is not None else None
    reason = "its experts are a list of modules, which run one after another as the data says"
    if read is None or not read.tokenwise or (call is not None and len(call.signatures) > 1):
        raise _NotServed(f"{reason}, and the block is not seen to treat each token alone")
    if capabilities.platform != "cpu":
        raise _NotServed(f"{reason}, which a CUDA graph cannot")
    return WrittenExpertsSpec((read.place,), reason, scores=read.scores)


def _read_rows(
    model: nn.Module,
    name: str,
    experts: str,
    block: SparseBlock,
    seen: Observation,
    known: dict[Any, moe_runner.RowsGiven | None],
) -> moe_runner.RowsGiven | None:
    module, call = model.get_submodule(name), seen.calls[name]
    child = experts.removeprefix(f"{name}.") if name else experts
    key = (same_code(module, call), block.num_experts, child)
    if key not in known:
        known[key] = moe_runner.read_rows(module, call.args, call.kwargs, experts=child, num_experts=block.num_experts)
    return known[key]


def _called_as_experts(
    name: str, block: SparseBlock, seen: Observation, parameters: list[str]
) -> tuple[str | None, bool]:
    """The outermost module under `name` that holds all of `parameters` and is called as experts are; whether it is with rows."""
    parts = parameters[0].split(".")[:-1]
    start = name.count(".") + 1 if name else 0
    for end in range(start + 1, len(parts) + 1):
        path = ".".join(parts[:end])
        call = seen.calls.get(path)
        holds = all(parameter.startswith(f"{path}.") for parameter in parameters)
        if holds and call is not None and moe_runner.is_routed_call(call.args, call.kwargs):
            return path, False
        if holds and call is not None and moe_runner.is_rows_call(call.args, call.kwargs, block.num_experts):
            return path, True
    return None, False


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
    _check_exchange(spec, capabilities, parallel)
    if parallel.experts and spec.num_experts + parallel.redundant < parallel.expert_ranks:
        raise _NotServed(f"its {spec.num_experts} experts cannot be dealt out over {parallel.expert_ranks} ranks")
    ranks = 1 if parallel.experts else parallel.expert_ranks
    if spec.intermediate_size % ranks:
        raise _NotServed(f"{ranks} ranks do not divide the {spec.intermediate_size} features within its experts")
    if name == "swigluoai" and (spec.intermediate_size // ranks) % multiple:
        raise _NotServed(
            f"the engine's kernel for `{name}` takes multiples of {multiple} features within experts, and on a rank it has "
            f"{spec.intermediate_size // ranks}"
        )
    return msgspec.structs.replace(spec, runs_as=name)


def _check_exchange(spec: ExpertsSpec, capabilities: Capabilities, parallel: Parallel) -> None:
    """Data-parallel ranks have tokens of their own, which must reach experts, or parts of them, on all of these ranks."""
    if parallel.data == 1:
        return
    if not capabilities.moe_exchanges_tokens:
        raise _NotServed("data-parallel ranks of this platform cannot give each other the tokens for its experts")
    if spec.rows_of_a_token > 1:
        raise _NotServed(
            f"its experts take {spec.rows_of_a_token} rows of each token, and data-parallel ranks exchange as many rows as there are tokens"
        )
    if parallel.experts and not capabilities.moe_maps_experts:
        raise _NotServed(
            "its experts are dealt out over ranks that exchange the ids of experts, and this platform's kernels are told places on one rank"
        )
