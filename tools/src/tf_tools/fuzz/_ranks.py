"""The planned model on one rank or on several at once, each rank a thread with its own part of the weights.

In: a model in memory, its plan, the ranks. Out: what each block gives on each rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from ast_rewrite import CompiledRewrite
from tf_backend.generated import derive
from tf_backend.plan.modules import consumed_children
from tf_backend.plan.schema import ModulePlan
from torch import nn
from vllm_layers_bridge.layers.linear import qkv_split_sizes
from vllm_layers_bridge.seams.leaf import holder_name
from vllm_layers_bridge.specs import QKVLinearSpec

from tf_tools.fuzz._layers import Exchange, Rank, RanksPart, layer_on_rank

_COMPARED = (torch.Tensor, bool, int, float, list)


@dataclass(frozen=True)
class Applied:
    """A plan to be applied: modules by name, compiled forwards by variant, the number of attention calls by module."""

    modules: Mapping[str, ModulePlan]
    rewrites: Mapping[str, CompiledRewrite]
    calls: Mapping[str, int]

    def on_rank(self, module: nn.Module, name: str, rank: Rank) -> nn.Module:
        """What the module of that name becomes on one rank. The module itself is left as it is."""
        plan = self.modules.get(name)
        if plan is not None and plan.action == "replace":
            return layer_on_rank(plan.layers[0], module, rank)
        kind = type(module)
        if plan is not None and plan.action == "rewrite":
            kind = derive(kind, self.rewrites[plan.variant or ""])
        made: nn.Module = kind.__new__(kind)
        made.__dict__.update({key: list(held) if type(held) is list else held for key, held in vars(module).items()})
        made.__dict__["_parameters"] = dict(module._parameters)
        layers = plan.layers if plan is not None else ()
        gone = {child for layer in layers for child in consumed_children(layer)}
        made.__dict__["_modules"] = {
            child: None if below is None else self.on_rank(below, f"{name}.{child}", rank)
            for child, below in module._modules.items()
            if child not in gone
        }
        for spec in layers:
            made._modules[spec.name] = layer_on_rank(spec, module, rank)
            if isinstance(spec, QKVLinearSpec):
                made.__dict__[spec.sizes_attribute] = qkv_split_sizes(spec, rank.ranks)
        for at in range(self.calls.get(name, 0) if self.calls.get(name, 0) > 1 else 0):
            made._modules[holder_name(at)] = nn.Module()
        for size in plan.sizes if plan is not None else ():
            made.__dict__[size.name] = size.local
        for shard in plan.shards if plan is not None else ():
            path, _, leaf = shard.name.rpartition(".")
            owner = made.get_submodule(path)
            whole = owner.get_parameter(leaf)
            run = rank.run(whole.shape[shard.axis], shard.pieces)
            owner._parameters[leaf] = nn.Parameter(
                whole.narrow(shard.axis, run.start, run.stop - run.start).clone(), requires_grad=False
            )
        return made


@dataclass
class Ran:
    """What a block gave in each of its calls, one after the other, and what it holds and was given after them."""

    results: list[Any]
    given: list[Any]
    state: dict[str, Any]


def run_on_ranks(
    applied: Applied, block: nn.Module, name: str, ranks: int, given: Callable[[], list[Any]]
) -> list[Ran]:
    """What comes of calling the block on each rank with each (args, kwargs) of `given()`. Raises what the first rank to fail raised."""
    exchange = Exchange(ranks)
    results: dict[int, Ran] = {}
    errors: dict[int, Exception] = {}

    def run(number: int) -> None:
        try:
            with torch.no_grad():
                made = applied.on_rank(block, name, Rank(number, exchange))
                ran = Ran([], given(), {})
                for args, kwargs in ran.given:
                    ran.results.append(made(*args, **kwargs))
                ran.state = _changed(block, made)
                results[number] = ran
                exchange.meet()  # no rank takes sums that the others do not
        except Exception as error:
            errors[number] = error
            exchange.leave()

    if ranks == 1:
        run(0)
    else:
        threads = [threading.Thread(target=run, args=(number,)) for number in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        first = [error for error in errors.values() if not isinstance(error, RanksPart)] or list(errors.values())
        raise first[0]
    return [results[number] for number in range(ranks)]


def _changed(before: nn.Module, after: nn.Module) -> dict[str, Any]:
    """The plain attributes that calls set to something else, and lists that they added to."""
    held = vars(before)
    return {
        key: value
        for key, value in vars(after).items()
        if isinstance(value, _COMPARED) and key[:1] != "_" and (key not in held or not _is_same(value, held[key]))
    }


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return type(one) is type(other) and (len(one) == len(other) if isinstance(one, list) else bool(one == other))
