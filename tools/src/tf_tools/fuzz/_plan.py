"""Plan the blocks of a program as a whole model is planned, without a head or a checkpoint around them.

In: a program. Out: module plans for one rank and for several, compiled rewrites, why what was not fused was not. Everything that decides is
the product's: the observer's hooks, the variant table, module plans, placement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from ast_rewrite import CompiledRewrite
from tf_backend.plan.borrowed import BorrowedParameters
from tf_backend.plan.fusions import installed_fusions
from tf_backend.plan.modules import plan_modules
from tf_backend.plan.observe import Made, ModuleCall, Observation, observing, observing_mask, takes, watching
from tf_backend.plan.schema import ModulePlan
from tf_backend.plan.sharing import sharing_refusals
from tf_backend.plan.tensor_parallel import Placed, place_modules
from tf_backend.plan.variants import VariantTable
from torch import nn
from transformers import PreTrainedModel
from vllm_layers_bridge.layers.position_table import PositionCall
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import AttentionSpec

from tf_tools.fuzz._program import Loaded, Model, arguments

TOKENS = 37
"""Tokens of the run that is observed; a prime that is no size of a module."""


@dataclass(slots=True)
class FuzzPlan:
    """What planning made of a model.

    reasons: for each block, why the fusions that were candidates did not take it.
    failure: how the run on meta ended for a block whose own code fails there.
    placed: by number of ranks, for those asked for.
    """

    modules: dict[str, ModulePlan]
    rewrites: dict[str, CompiledRewrite]
    attention: dict[str, tuple[AttentionSpec, ...]]
    reasons: dict[str, tuple[str, ...]]
    failures: dict[str, str]
    placed: dict[int, Placed] = field(default_factory=dict)


def planned(loaded: Loaded, ranks: tuple[int, ...]) -> FuzzPlan:
    """Plan the program on one rank and on each of `ranks`. Whatever the product raises is raised."""
    model = loaded.model(on_meta=True)
    as_model = cast(PreTrainedModel, model)
    seen, attention, failures = _observe(loaded, model)
    table = VariantTable(installed_fusions())
    with attention_by(model, attention_leaf), torch.no_grad():
        plans = plan_modules(as_model, "", None, seen, table, attention)
        rewrites = {built.variant.id: built.rewrite for built in table.built if built.rewrite is not None}
        variants = {built.variant.id: built.variant for built in table.built}
        missed = {
            p.name: tuple(f"{m.fusion}: {m.reason}" for m in variants[p.variant].misses) for p in plans if p.variant
        }
        found = FuzzPlan({plan.name: plan for plan in plans}, rewrites, attention, missed, failures)
        if not list(sharing_refusals(model)):
            for number in ranks:
                found.placed[number] = place_modules(as_model, plans, seen, table, attention, number)
    return found


@contextmanager
def attention_by(model: Model, function: Callable[..., Any]) -> Iterator[None]:
    """Have the model's blocks find `function` behind transformers' attention interface."""
    with observing(cast(PreTrainedModel, model), function, observing_mask):
        yield


def _observe(loaded: Loaded, model: Model) -> tuple[Observation, dict[str, tuple[AttentionSpec, ...]], dict[str, str]]:
    names = {id(module): name for name, module in model.named_modules()}
    seen = Observation(tokens=TOKENS)
    attention: dict[str, tuple[AttentionSpec, ...]] = {}
    failures: dict[str, str] = {}

    running: list[str] = []
    borrowed = BorrowedParameters(model, lambda: running[-1] if running else "")

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append(names[id(module)])
        call = ModuleCall(args, dict(kwargs))
        seen.calls.setdefault(names[id(module)], call).signatures.add(call.signature)

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        running.pop()
        if module is model.positions:
            seen.made.append(Made(names[id(module)], PositionCall(args, kwargs), output))

    def attend(module: nn.Module, query: Any, key: Any, value: Any, *others: Any, **keywords: Any) -> Any:
        spec = AttentionSpec(
            query.shape[1], key.shape[1], query.shape[3], value.shape[3], float(keywords.get("scaling") or 0.5)
        )
        name = names[id(module)]
        attention[name] = (*attention.get(name, ()), spec)
        return attention_leaf(module, query, key, value)

    with attention_by(model, attend), torch.no_grad():
        with watching(cast(PreTrainedModel, model), enter, leave):
            args, kwargs = arguments(loaded.program, 1, TOKENS, model.positions, "meta")
        for at, block in enumerate(model.layers):
            with watching(cast(PreTrainedModel, model), enter, leave):
                try:
                    with borrowed:
                        block(*args, **kwargs)
                except Exception as error:  # the block's own code
                    running.clear()
                    if not takes(block, seen.calls[f"layers.{at}"]):
                        del seen.calls[f"layers.{at}"]
                    failures[f"layers.{at}"] = f"{type(error).__name__}: {error}"
    seen.borrowed = frozenset(borrowed.found)
    return seen, attention, failures
