"""Modules whose values follow the longest position that they are given: put behind a table, so that each token is alone with its own.

transformers' rotary embeddings of changing frequencies look at all positions at once and at what they were called with before. In the
engine, tokens of many requests lie in one row. In: a model on meta whose run ended in such a module, or saw it mix tokens. Out: the model
with a stand-in that gives values of the right shapes on meta, and the original beside it, from which the table is built when the plan is
applied.

What a table holds at position p is what the module gives for a sequence that ends at p. Below the first position at which the module
changes its state that is, for every sequence, what transformers computes; from there on it is what transformers computes when it
generates token by token.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from vllm_layers_bridge.layers.position_table import PositionCall, find_change
from vllm_layers_bridge.specs import PositionTableSpec

from tf_backend.errors import TfBackendError
from tf_backend.model.buffers import initialise, non_persistent_buffers
from tf_backend.plan.observe import LONGEST, Observation
from tf_backend.plan.schema import Plan, Refusal

_SAMPLE = 5


@dataclass(frozen=True, slots=True)
class Tabled:
    """A module that a table takes the place of: as transformers made it, on meta; how it is called; what the plan says."""

    module: nn.Module
    calls: tuple[PositionCall, ...]
    spec: PositionTableSpec


class StandIn(nn.Module):
    """On meta, in the place of a tabled module: values of its shapes for any positions. `calls` collects how it was called."""

    def __init__(self, module: nn.Module, real: nn.Module) -> None:
        super().__init__()
        self.original = (module,)  # in tuples: not children, their buffers are not the model's
        self.real = (real,)
        self.calls: dict[object, PositionCall] = {}

    def forward(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
        """Tensors [1, tokens, width] on meta."""
        call = PositionCall(args, kwargs)
        self.calls.setdefault(call.key, call)
        positions = call.positions()
        assert positions is not None
        values = call.run(copy.deepcopy(self.real[0]), torch.zeros((1, 1), dtype=torch.long))
        return tuple(value.to("meta").expand(*positions.shape, value.shape[-1]) for value in values)


def stand_in_for_positions(model: PreTrainedModel, seen: Observation) -> str | None:
    """Put a stand-in where the run of `seen` ended or saw tokens mixed, if that is a module of positions; its name, or None if none is."""
    doubted = [seen.failure.module] if seen.failure is not None else []
    for name in dict.fromkeys((*doubted, *(mixing.module for mixing in seen.mixing))):
        if name and _stand_in(model, name, seen):
            return name
    return None


def _stand_in(model: PreTrainedModel, name: str, seen: Observation) -> bool:
    module, called = model.get_submodule(name), seen.calls[name]
    call = PositionCall(called.args, called.kwargs)
    if isinstance(module, StandIn) or call.positions() is None or any(True for _ in module.parameters()):
        return False
    if module._modules or not set(_full(name, module)) <= set(non_persistent_buffers(model)):
        return False
    real = on_cpu(model, name, module)
    if real is None or not _is_of_positions(real, call):
        return False
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, StandIn(module, real))
    return True


def tabled_modules(model: nn.Module) -> dict[str, Tabled]:
    """By name, each module that a stand-in stands for; call after a run."""
    found: dict[str, Tabled] = {}
    for name, module in model.named_modules():
        if isinstance(module, StandIn) and module.calls:
            calls = tuple(module.calls.values())
            changes = [find_change(module.real[0], call, LONGEST) for call in calls]
            below, beyond = min(changes, key=lambda change: change[0])
            found[name] = Tabled(module.original[0], calls, PositionTableSpec("", len(calls), below, beyond))
    return found


@dataclass(frozen=True, slots=True)
class Reach:
    """Up to how many tokens sequences are what transformers computes for the sake of one module, why no further, and what else to do.

    Longer ones are refused, unless there is a result of transformers' own that they equal: then `beyond` says which.
    """

    tokens: int
    module: str
    why: str
    otherwise: str = ""
    beyond: str = ""

    def __str__(self) -> str:
        if self.beyond:
            return f"`{self.module}` {self.why}. {self.beyond}. Set `--max-model-len {self.tokens}` to stay within"
        return f"served for sequences of up to {self.tokens:,} tokens: `{self.module}` {self.why}"


def reaches(plan: Plan) -> Iterator[Reach]:
    """Each bound on the length of sequences that is the model's own."""
    chunks = {
        attention.chunk: attention.module for attention in reversed(plan.attention) if attention.chunk is not None
    }
    for chunk, name in chunks.items():
        why = f"attends within chunks of {chunk} tokens, which no attention layer of the engine does but in the first of them"
        yield Reach(chunk, name, why, ", or use `--model-impl vllm`, if vLLM has an implementation of its own")
    for table in plan.position_rows:
        why = f"looks up a table of {table.rows} rows by position, which has one for the first {table.end} positions"
        yield Reach(table.end, table.module, why)
    for module in plan.modules:
        for spec in module.layers:
            if not isinstance(spec, PositionTableSpec) or spec.beyond == "same":
                continue
            below = spec.constant_below
            if spec.beyond == "another":
                why = (
                    f"has one set of frequencies for sequences of up to {below} tokens and another for longer ones: keys in the engine's "
                    "cache would be of one set and queries of the other"
                )
                yield Reach(below, module.name, why, ", or use `--model-impl vllm`, which takes the second set for all")
            else:
                why = f"changes its frequencies with the length of a sequence from {below} tokens on"
                beyond = (
                    "Tokens beyond are rotated as transformers does when it generates token by token; a longer prompt that it is given at "
                    "once it rotates otherwise, its first tokens too"
                )
                yield Reach(below, module.name, why, beyond=beyond)


def position_refusals(plan: Plan, longest: int) -> Iterator[Refusal]:
    """The bounds that lie below what the engine is asked for."""
    for reach in reaches(plan):
        if longest > reach.tokens and not reach.beyond:
            yield Refusal(
                f"`{reach.module}` {reach.why}. The engine is asked for sequences of up to {longest} tokens",
                reach.module,
                None,
                f"Set `--max-model-len {reach.tokens}` or less{reach.otherwise}.",
            )


def position_notes(plan: Plan, longest: int) -> Iterator[str]:
    """What a user should know of sequences as long as the engine is asked for."""
    return (str(reach) for reach in reaches(plan) if reach.beyond and longest > reach.tokens)


def _is_of_positions(real: nn.Module, call: PositionCall) -> bool:
    """Whether the values are [1, tokens, width], one row for each position, whatever else is given."""
    positions = torch.arange(_SAMPLE)[None]
    try:
        values = call.run(copy.deepcopy(real), positions)
        others = call.run(copy.deepcopy(real), positions, fill=3.0)
        shifted = call.run(copy.deepcopy(real), positions[:, 1:])
    except Exception:  # the module's own code, given less than it is used to
        return False
    has_rows = len(values) > 1 and all(value.ndim == 3 and value.shape[:2] == (1, _SAMPLE) for value in values)
    return has_rows and all(
        torch.equal(value, other) and torch.equal(value[:, 1:], part)
        for value, other, part in zip(values, others, shifted, strict=True)
    )


def on_cpu(model: PreTrainedModel, name: str, module: nn.Module) -> nn.Module | None:
    """A copy with its buffers computed; None where the model's initialisation does not."""
    real = copy.deepcopy(module)
    try:
        initialise(model, name, real, tuple(real._buffers), torch.device("cpu"))
    except TfBackendError:
        return None
    return real


def _full(name: str, module: nn.Module) -> tuple[str, ...]:
    return tuple(f"{name}.{leaf}" for leaf, _ in module.named_buffers())
