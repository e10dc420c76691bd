"""Routing inside the engine's runner, or the one fact that keeps it in the model's own code.

In: a sparse block whose experts the runner takes, its observation, capabilities. Out: the experts' spec with its routing, and what becomes
of the router, which gives logits then and chooses nothing; or a reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import moe_runner
import msgspec
from moe_runner import ExpertsSpec, Router, RouterSite, RouterSpec, Routing, SparseBlock
from torch import nn
from transformers import PreTrainedModel

from tf_backend.capabilities import Capabilities
from tf_backend.plan.observe import ModuleCall, Observation
from tf_backend.plan.schema import Parallel


@dataclass(frozen=True, slots=True)
class Inside:
    """Experts that are given logits, and the router, by full name, that gives them."""

    experts: ExpertsSpec
    router: str
    logits: RouterSpec


@dataclass(slots=True)
class Routers:
    """The routers of a model, each read once for all that are alike."""

    model: PreTrainedModel
    seen: Observation
    capabilities: Capabilities
    parallel: Parallel
    known: dict[Any, Router] = field(default_factory=dict)
    holders: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.holders.update(id(module) for _, module in self.model.named_modules(remove_duplicate=False))

    def inside(self, name: str, block: SparseBlock, experts: str, spec: ExpertsSpec) -> Inside | str:
        """Routing inside for the block `name` and its module `experts`; or the first fact that prevents it."""
        if spec.takes_rows:
            return "the weights are laid on what goes into its experts, row by row"
        if block.num_scores != block.num_experts:
            return (
                f"it chooses among {block.num_scores or 'an unknown number of'} scores for {block.num_experts} experts"
            )
        if moe_runner.asked_of_engine(spec.gate, spec.runs_as).limit is not None:
            # Which kernel vLLM takes depends on who routes, and only the one for experts routed outside is known to take such a limit.
            return "its experts have a limit of the model's own, which is known of kernels for ids and weights alone"
        if self.parallel.experts and not self.capabilities.moe_maps_experts:
            return "where experts are dealt out over ranks, this platform's kernels are told the place of each expert"
        module, call = self.model.get_submodule(name), self.seen.calls[name]
        child = experts.removeprefix(f"{name}.") if name else experts
        site = moe_runner.find_router(module, call.args, call.kwargs, experts=child, places=spec.arguments)
        if isinstance(site, str):
            return site
        router = f"{name}.{site.name}" if name else site.name
        if self.holders[id(self.model.get_submodule(router))] != 1 or router not in self.seen.calls:
            return "its router has several places in the model"
        if len(call.signatures) > 1 or len(self.seen.calls[router].signatures) > 1:
            return "it is called in different ways"
        read = self._read(router, site, spec.num_experts)
        if read.spec is None or read.form is None:
            return read.reason
        if why := moe_runner.why_not_engine(read.form, self.capabilities.moe_routers):
            return why
        correction = ""
        if read.form.biased:
            own = f"{router}.{read.correction}" if read.given is None else site.given.get(read.given, "")
            correction = own if read.given is None or not name else f"{name}.{own}" if own else ""
            if not self._is_loaded(correction):
                return "what it adds to its scores is no parameter or buffer that a checkpoint holds"
        routing = Routing(read.form, correction)
        logits = msgspec.structs.replace(
            read.spec, engine_gate=read.spec.engine_gate and router not in self.seen.borrowed
        )
        return Inside(msgspec.structs.replace(spec, routing=routing), router, logits)

    def _read(self, router: str, site: RouterSite, num_experts: int) -> Router:
        module, call = self.model.get_submodule(router), self.seen.calls[router]
        key = (same_code(module, call), num_experts, site.weights, site.ids, site.logits)
        if key not in self.known:
            self.known[key] = moe_runner.read_router(
                module,
                call.args,
                call.kwargs,
                weights=site.weights,
                ids=site.ids,
                logits=site.logits,
                num_experts=num_experts,
            )
        return self.known[key]

    def _is_loaded(self, name: str) -> bool:
        owner, _, leaf = name.rpartition(".")
        holder = self.model.get_submodule(owner)
        return leaf in holder._parameters or (
            leaf in holder._buffers and leaf not in holder._non_persistent_buffers_set
        )


def same_code(module: nn.Module, call: ModuleCall) -> Any:
    """Equal for instances that run the same code on tensors of the same shapes with the same plain values."""
    parts = []
    for name, inner in module.named_modules():
        shapes = tuple((key, None if p is None else tuple(p.shape)) for key, p in inner._parameters.items())
        plain = {key: repr(v) for key, v in vars(inner).items() if isinstance(v, bool | int | float | str | type(None))}
        shapes += tuple((key, None if b is None else tuple(b.shape)) for key, b in inner._buffers.items())
        parts.append((name, type(inner), shapes, tuple(sorted(plain.items())), id(getattr(inner, "config", None))))
    return tuple(parts), call.signature
