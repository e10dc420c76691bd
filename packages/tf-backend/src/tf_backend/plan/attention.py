"""From observed calls of the attention interface to layers of the engine, or to the reason why not.

In: an observation and the capabilities of the platform. Out: an `AttentionPlan` per call and refusals. Every keyword that reaches the
interface is accounted for: it is expressed, it is known not to change the result, or the model is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from torch import nn
from vllm_layers_bridge.fusions import AttentionCalls
from vllm_layers_bridge.seams.leaf import holder_name
from vllm_layers_bridge.specs import AttentionSpec

from tf_backend.plan.observe import AttentionCall, Observation
from tf_backend.plan.places import place_of_class
from tf_backend.plan.refusals import REMEDY
from tf_backend.plan.schema import AttentionPlan, ModulePlan, Refusal, Variant

INERT_KEYWORDS = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
    }
)
"""Keywords that models pass through to the interface and that no attention function of transformers reads."""

SINKS = "s_aux"
"""Keyword by which transformers passes a score per head that takes part in the softmax and has no value."""

EXPRESSED_KEYWORDS = frozenset({"scaling", "softcap", "sliding_window", "dropout", "is_causal", SINKS})
"""Keywords that an `AttentionSpec` carries, or whose one admitted value is checked here; a window must be the mask's."""


class AttentionCapabilities(Protocol):
    """What planning asks of the recorded capabilities."""

    @property
    def name(self) -> str: ...

    @property
    def attention_head_sizes(self) -> tuple[int, ...]: ...

    @property
    def supports_sliding_window(self) -> bool: ...

    @property
    def supports_logits_soft_cap(self) -> bool: ...


def plan_attention(
    model: nn.Module, seen: Observation, capabilities: AttentionCapabilities
) -> tuple[tuple[AttentionPlan, ...], tuple[Refusal, ...]]:
    """One plan per call, in the order of calls; refusals for what no attention layer of the engine computes."""
    plans: list[AttentionPlan] = []
    refusals: list[Refusal] = []
    places = _places(seen)
    for call, (holder, turn) in zip(seen.attention, places, strict=True):
        owner = model.get_submodule(call.module)
        problem = _problem(call, owner, seen.tokens, capabilities) or _turn_problem(call, turn, seen)
        if problem is None:
            chunk = call.mask.size if call.mask.kind == "chunked" else None
            index = _layer_index(call.module, len(plans))
            plans.append(AttentionPlan(call.module, index, _spec(call, owner), holder, turn, chunk))
        else:
            cls = type(owner)
            refusals.append(Refusal(f"`{cls.__name__}` {problem}", call.module, place_of_class(cls), REMEDY))
    return tuple(plans), _merged(refusals)


def _places(seen: Observation) -> Iterator[tuple[str, int | None]]:
    """For each call, the child that holds its layer where its module makes several in one run, and its turn where several runs make one."""
    in_run: Counter[tuple[str, int]] = Counter((call.module, call.run) for call in seen.attention)
    runs: dict[str, list[int]] = {}
    for module, run in in_run:
        runs.setdefault(module, []).append(run)
    made: Counter[tuple[str, int]] = Counter()
    for call in seen.attention:
        at = call.module, call.run
        several = max(in_run[call.module, run] for run in runs[call.module]) > 1
        holder = holder_name(made[at]) if several else ""
        made[at] += 1
        yield holder, runs[call.module].index(call.run) if len(runs[call.module]) > 1 else None


def _turn_problem(call: AttentionCall, turn: int | None, seen: Observation) -> str | None:
    """Why the calls of a module that attends in several runs cannot be told apart by their order."""
    if turn is None:
        return None
    if not seen.is_steady:
        return "attends in several runs, how often or in which order depends on its input"
    calls = [other for other in seen.attention if other.module == call.module]
    if len(set(Counter(other.run for other in calls).values())) > 1:
        return "calls the attention interface several times, and not as often each time that it runs"
    if len({_heads(other) for other in calls}) > 1:
        return "attends with heads of other sizes when it runs again"
    return None


def _heads(call: AttentionCall) -> tuple[int, ...]:
    return (call.query[1], call.key[1], call.query[3], call.value[3])


def _problem(call: AttentionCall, owner: nn.Module, tokens: int, capabilities: AttentionCapabilities) -> str | None:
    """Why the engine cannot compute this call, as a verb phrase; None when it can."""
    head_dim = max(call.query[-1], call.value[-1])
    if (groups := _uneven_heads(call)) is not None:
        return f"attends with {groups[0]} heads of queries and {groups[1]} of keys and values, which are no equal groups of heads"
    if not _has_layout(call, tokens):
        shapes = ", ".join(str(tuple(size)) for size in (call.query, call.key, call.value))
        return f"attends with queries, keys and values of {shapes}, which are not one row of {tokens} tokens"
    if call.mask.kind == "bidirectional":
        return "attends to later tokens, as an encoder does; only causal attention is served yet"
    if call.mask.kind not in {"full", "sliding", "chunked"}:
        return f"attends under a mask that no attention layer of the engine takes: {call.mask.reason or call.mask}"
    if head_dim not in capabilities.attention_head_sizes:
        sizes = ", ".join(str(size) for size in capabilities.attention_head_sizes)
        return f"has heads of {head_dim}; the attention of {capabilities.name} takes {sizes}"
    if call.mask.kind == "sliding" and not capabilities.supports_sliding_window:
        return f"attends within a window of {call.mask.size}; the attention of {capabilities.name} has no windows"
    if call.keywords.get("softcap") and not capabilities.supports_logits_soft_cap:
        return f"caps its attention scores; the attention of {capabilities.name} does not"
    return _keyword_problem(call) or _sinks_problem(call, owner)


def _has_layout(call: AttentionCall, tokens: int) -> bool:
    """Query [1, heads, tokens, head_dim], key and value [1, kv heads, tokens, ...], query heads in equal groups."""
    query, key, value = call.query, call.key, call.value
    if not len(query) == len(key) == len(value) == 4:
        return False
    is_one_row = all(size[0] == 1 and size[2] == tokens for size in (query, key, value))
    return is_one_row and key[3] == query[3] and key[1] == value[1] and key[1] > 0 and query[1] % key[1] == 0


def _uneven_heads(call: AttentionCall) -> tuple[int, int] | None:
    """Numbers of query and key-value heads, where they are axes of four and do not divide."""
    if not len(call.query) == len(call.key) == len(call.value) == 4 or call.key[1] != call.value[1]:
        return None
    heads, kv_heads = call.query[1], call.key[1]
    return (heads, kv_heads) if kv_heads > 0 and heads % kv_heads else None


def _keyword_problem(call: AttentionCall) -> str | None:
    keywords = {name: value for name, value in call.keywords.items() if value is not None}
    unknown = sorted(keywords.keys() - INERT_KEYWORDS - EXPRESSED_KEYWORDS)
    if unknown:
        return f"passes `{unknown[0]}` to the attention interface, which no attention layer of the engine takes yet"
    if not isinstance(keywords.get("scaling"), int | float):
        return "passes no constant `scaling` to the attention interface"
    if not isinstance(keywords.get("softcap", 0.0), int | float):
        return "passes a `softcap` that is not a constant"
    window = keywords.get("sliding_window")
    if window is not None and window != call.mask.size:
        return f"passes a window of {window} beside a mask that is {call.mask}: which is meant cannot be told"
    if keywords.get("dropout", 0.0) != 0.0:
        return "drops attention weights at random while serving"
    if keywords.get("is_causal", True) is not True:
        return "passes `is_causal` as something else than True"
    return None


def _sinks_problem(call: AttentionCall, owner: nn.Module) -> str | None:
    sinks = call.keywords.get(SINKS)
    if sinks is None:
        return None
    if _parameter_name(owner, sinks) is None:
        return f"passes `{SINKS}` to the attention interface, which is no parameter of its own"
    if tuple(sinks.shape) != (call.query[1],):
        return f"passes `{SINKS}` of {tuple(sinks.shape)}, expected one entry for each of {call.query[1]} heads"
    return None


def _parameter_name(owner: nn.Module, tensor: object) -> str | None:
    """Under which name `owner` itself holds the very tensor as a parameter."""
    return next((name for name, own in owner.named_parameters(recurse=False) if own is tensor), None)


def _spec(call: AttentionCall, owner: nn.Module) -> AttentionSpec:
    softcap = call.keywords.get("softcap")
    return AttentionSpec(
        num_heads=call.query[1],
        num_kv_heads=call.key[1],
        head_dim=call.query[3],
        value_head_dim=call.value[3],
        scale=float(call.keywords["scaling"]),
        sliding_window=call.mask.size if call.mask.kind == "sliding" else None,
        logits_soft_cap=float(softcap) if softcap else None,
        sinks=_parameter_name(owner, call.keywords.get(SINKS)),
    )


def holder_refusals(
    model: nn.Module, plans: tuple[AttentionPlan, ...], modules: tuple[ModulePlan, ...], variants: tuple[Variant, ...]
) -> Iterator[Refusal]:
    """Classes that call the interface several times, and whose forward was not rewritten so that each call has a layer of its own."""
    by_id = {variant.id: variant for variant in variants}
    by_module = {plan.name: by_id[plan.variant] for plan in modules if plan.variant is not None}
    told: set[str] = set()
    for name in dict.fromkeys(plan.module for plan in plans if plan.holder):
        variant = by_module.get(name)
        if variant is not None and any(fusion.name == AttentionCalls.name for fusion in variant.fusions):
            continue
        cls = type(model.get_submodule(name))
        missed = next((m for m in variant.misses if m.fusion == AttentionCalls.name), None) if variant else None
        reason = f": {missed.reason}" if missed else ""
        if cls.__name__ not in told:
            told.add(cls.__name__)
            yield Refusal(
                f"`{cls.__name__}` calls the attention interface more than once, and its calls cannot be told apart in its source{reason}",
                name,
                (missed.place if missed else None) or place_of_class(cls),
                REMEDY,
            )


def specs_by_module(plans: tuple[AttentionPlan, ...]) -> dict[str, tuple[AttentionSpec, ...]]:
    """The calls of each module, in its first run where several attend."""
    found: dict[str, tuple[AttentionSpec, ...]] = {}
    for plan in plans:
        if plan.turn:
            continue
        found[plan.module] = (*found.get(plan.module, ()), plan.spec)
    return found


def _layer_index(name: str, default: int) -> int:
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
    return int(numbers[0]) if numbers else default


def _merged(refusals: list[Refusal]) -> tuple[Refusal, ...]:
    """One refusal per reason: the first module stands for all."""
    first: dict[tuple[str, object], Refusal] = {}
    for refusal in refusals:
        first.setdefault((refusal.reason, refusal.place), refusal)
    return tuple(first.values())
