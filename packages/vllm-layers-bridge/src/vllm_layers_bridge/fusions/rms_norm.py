"""A root-mean-square norm, whole: the module becomes vLLM's norm layer.

    class LlamaRMSNorm(nn.Module):                               RMSNorm(hidden_size=128, eps=1e-06)
        def forward(self, hidden_states):                   ->
            ... hidden_states * rsqrt(mean(hidden_states ** 2) + eps) * weight

Every spelling that computes it is taken: powers and products, `rsqrt`, `** -0.5` and division by `sqrt`, casts anywhere, a weight that is an
offset from one, no weight. The forward must be exactly that, with nothing before, after or beside it.
"""

from __future__ import annotations

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
from torch import nn

from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions.protocol import ModuleFacts
from vllm_layers_bridge.specs import LayerSpec, RMSNormSpec


def _cast(pattern: Pattern) -> Pattern:
    return transparent(pattern, CASTS)


_INPUT = _cast(any_value("input"))
_VARIANCE = op("mean", dim=-1, keepdim=True)(_cast(square(_INPUT)))
_NORMED = _cast(times_rsqrt(_INPUT, _cast(_VARIANCE) + scalar("eps")))
_WEIGHT = _cast(param("weight"))
_OFFSET_WEIGHT = _cast(_WEIGHT + scalar("offset"))

PATTERN = whole(_cast(_NORMED * _OFFSET_WEIGHT) | _cast(_NORMED * _WEIGHT) | _NORMED)


class RMSNorm:
    """See the module."""

    name = "rms_norm"
    replaces_module = True

    def is_candidate(self, trace: Trace) -> bool:
        """A module without children that takes a mean and a root."""
        if trace.module._modules:
            return False
        names = {canonical(node) for node in trace.graph.nodes}
        return "mean" in names and bool(names & {"rsqrt", "sqrt", "pow", "reciprocal"})

    def match(self, trace: Trace) -> Match | Miss:
        """The whole forward, or the nearest miss."""
        return find(PATTERN, trace)

    def check(self, match: Match, module: nn.Module, facts: ModuleFacts) -> None:
        """The input must be the module's own, the weight its only tensor and of the input's width."""
        if match["input"].op != "placeholder":
            raise NotFusable("what is normalised is not the module's input")
        offset = match.get("offset", 0.0)
        if offset not in (0.0, 1.0):
            raise NotFusable(f"its weight is an offset from {offset}; vLLM's norms take offsets from 0 and 1")
        tensors = {name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor is not None}
        used = {str(match["weight"].target)} if "weight" in match else set()
        if tensors != used or not used <= {"weight"}:
            raise NotFusable(
                f"it holds {sorted(tensors)} and its forward uses {sorted(used)}; vLLM's norm holds `weight`"
            )
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.ndim != 1:
            raise NotFusable(f"its weight has {weight.ndim} axes; vLLM's norm takes one")

    def rewrite(self, match: Match, trace: Trace, patch: Patch) -> None:
        """Nothing to rewrite: the module is replaced."""

    def layers(self, match: Match, module: nn.Module, facts: ModuleFacts) -> tuple[LayerSpec, ...]:
        """The norm, in the module's place."""
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor):
            size = weight.shape[0]
        else:
            value = match.subject.value(match["input"])
            assert isinstance(value, torch.Tensor)
            size = value.shape[-1]
        return (
            RMSNormSpec(
                hidden_size=size,
                eps=float(match["eps"]),
                offset=float(match.get("offset", 0.0)),
                has_weight="weight" in match,
            ),
        )
