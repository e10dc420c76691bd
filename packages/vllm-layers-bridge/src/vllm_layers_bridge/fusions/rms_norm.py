"""A root-mean-square norm, whole: the module becomes vLLM's norm layer.

    class LlamaRMSNorm(nn.Module):                               RMSNorm(hidden_size=128, eps=1e-06)
        def forward(self, hidden_states):                   ->
            ... hidden_states * rsqrt(mean(hidden_states ** 2) + eps) * weight

Every spelling that computes it is taken: powers and products, `rsqrt`, `** -0.5` and division by `sqrt`, casts to a wider type and back, a
weight that is an offset from one, no weight, torch's own `rms_norm`. The forward must be exactly that, with nothing before, after or
beside it.
"""

from __future__ import annotations

from typing import Literal

import torch
from ast_rewrite import Patch
from fx_match import (
    CASTS,
    Match,
    Miss,
    Pattern,
    Trace,
    any_value,
    canonical,
    find,
    op,
    param,
    scalar,
    square,
    times_rsqrt,
    transparent,
    whole,
)
from torch import fx, nn

from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions.children import has_hooks
from vllm_layers_bridge.fusions.protocol import ModuleFacts
from vllm_layers_bridge.fusions.rms_norm_misses import explain, unfit
from vllm_layers_bridge.specs import LayerSpec, RMSNormSpec


def _cast(pattern: Pattern) -> Pattern:
    return transparent(pattern, CASTS)


_INPUT = _cast(any_value("input"))
_VARIANCE = op("mean", dim=-1, keepdim=True)(_cast(square(_INPUT)))
_WEIGHT = _cast(param("weight"))
_OFFSET_WEIGHT = _cast(_WEIGHT + scalar("offset"))
_TORCH = op("rms_norm", normalized_shape=any_value("shape"), eps=scalar("eps"))
_NORMED = _cast(times_rsqrt(_INPUT, _cast(_VARIANCE) + scalar("eps")) | _TORCH(_INPUT))
_TORCH_WEIGHTED = op("rms_norm", normalized_shape=any_value("shape"), eps=scalar("eps"), weight=_WEIGHT)(_INPUT)

PATTERN = whole(_cast(_NORMED * _OFFSET_WEIGHT) | _cast(_NORMED * _WEIGHT) | _NORMED | _cast(_TORCH_WEIGHTED))


class RMSNorm:
    """See the module."""

    name = "rms_norm"
    replaces_module = True

    def is_candidate(self, trace: Trace) -> bool:
        """A module without children that takes a mean and a root, and subtracts nothing, as a LayerNorm does."""
        if trace.module._modules:
            return False
        names = {canonical(node) for node in trace.graph.nodes}
        return "mean" in names and "sub" not in names and bool(names & {"rsqrt", "sqrt", "pow", "reciprocal"})

    def match(self, trace: Trace) -> Match | Miss:
        """The whole forward, or the nearest miss."""
        found = find(PATTERN, trace)
        if isinstance(found, Miss):
            return explain(found, trace, find(_NORMED, trace))
        if (problem := unfit(found, trace)) is not None:
            return Miss(problem[1], problem[0], found.captures, found.nodes, found.subject)
        return found

    def check(self, match: Match, module: nn.Module, facts: ModuleFacts) -> None:
        """The weight must be the module's only tensor and of the input's width; the call must be one that vLLM's layer takes."""
        offset = match.get("offset", 0.0)
        if offset not in (0.0, 1.0):
            raise NotFusable(f"its weight is an offset from {offset}; vLLM's norms take offsets from 0 and 1")
        tensors = {name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor is not None}
        used = {str(match["weight"].target)} if "weight" in match else set()
        if tensors != used or not used <= {"weight"}:
            raise NotFusable(
                f"it holds {sorted(tensors)} and its forward uses {sorted(used)}; vLLM's norm holds `weight`"
            )
        if has_hooks(module):
            raise NotFusable("it has hooks, which would be lost with it")
        _require_one_argument(match, facts)
        width = _width(match, module, facts)
        weight = module.weight if used else None
        if isinstance(weight, torch.Tensor):
            if weight.ndim != 1:
                raise NotFusable(f"its weight has {weight.ndim} axes; vLLM's norm takes one")
            if width is not None and weight.shape[0] != width:
                raise NotFusable(f"its weight has {weight.shape[0]} entries and its input {width} on the last axis")
            dtype = _traced_input(match).dtype
            if weight.dtype != dtype:
                raise NotFusable(f"its weight is kept in {weight.dtype} beside an input of {dtype}")
        elif width is None:
            raise NotFusable("it has no weight, and the width of its input is not known")

    def rewrite(self, match: Match, trace: Trace, patch: Patch) -> None:
        """Nothing to rewrite: the module is replaced."""

    def layers(self, match: Match, module: nn.Module, facts: ModuleFacts) -> tuple[LayerSpec, ...]:
        """The norm, in the module's place."""
        weight = module.weight if "weight" in match else None
        width = weight.shape[0] if isinstance(weight, torch.Tensor) else _width(match, module, facts)
        assert width is not None
        return (
            RMSNormSpec(
                hidden_size=width,
                eps=float(match["eps"]),
                offset=float(match.get("offset", 0.0)),
                has_weight="weight" in match,
                scaled_in=_scaled_in(match),
            ),
        )


def _scaled_in(match: Match) -> Literal["wide", "input"] | None:
    """Whether the weight is multiplied in before the result is cast to the input's type, or after; None where it is widened after that."""
    root = _without_casts(match.root)[0]
    if "weight" not in match or canonical(root) == "rms_norm":
        return "wide"
    sides = [_without_casts(side) for side in root.all_input_nodes]
    weight = next((side for side in sides if _is_weight(side[0], match["weight"])), None)
    normed = next((side for side in sides if side is not weight), None)
    if weight is None or normed is None:
        return None
    if not normed[1]:
        return "wide"
    is_cast = weight[1] or (weight[0] is not match["weight"] and _without_casts(weight[0].all_input_nodes[0])[1])
    return None if is_cast else "input"


def _is_weight(node: fx.Node, weight: fx.Node) -> bool:
    return node is weight or any(_without_casts(given)[0] is weight for given in node.all_input_nodes)


def _without_casts(node: fx.Node) -> tuple[fx.Node, bool]:
    """The node below the casts around `node`, and whether there are any."""
    is_cast = False
    while canonical(node) in CASTS:
        node, is_cast = node.all_input_nodes[0], True
    return node, is_cast


def _require_one_argument(match: Match, facts: ModuleFacts) -> None:
    """vLLM's norm takes a second argument for a residual to add: another one there would be added to the input."""
    if facts.args is None and facts.kwargs is None:
        assert match.subject.trace is not None
        code = match.subject.trace.code
        if code.co_argcount + code.co_kwonlyargcount != 2 or code.co_flags & 0x0C:  # *args, **kwargs
            raise NotFusable("its forward takes more than its input, and how it is called is not known")
        return
    if facts.kwargs:
        raise NotFusable(f"it is called with `{next(iter(facts.kwargs))}=`; vLLM's norm takes its input by position")
    if len(facts.args or ()) != 1:
        raise NotFusable(f"it is called with {len(facts.args or ())} arguments; vLLM's norm takes its input alone")


def _traced_input(match: Match) -> torch.Tensor:
    value = match.subject.value(match["input"])
    assert isinstance(value, torch.Tensor)
    return value


def _width(match: Match, module: nn.Module, facts: ModuleFacts) -> int | None:
    """The last axis of what this instance is given; None where that is not known."""
    if facts.args:
        first = facts.args[0]
        return int(first.shape[-1]) if isinstance(first, torch.Tensor) else None
    return int(_traced_input(match).shape[-1]) if module is match.subject.module else None
