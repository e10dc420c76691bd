"""Gate and up projections of one input in one weight, where more stands between them and their product than an activation.

    gate = self.gate_proj(x).clamp(max=self.limit)          gate_output, up_output = self.gate_up_proj(x).chunk(2, dim=-1)
    up = self.up_proj(x).clamp(-self.limit, self.limit)  ->  gate = gate_output.clamp(max=self.limit)
    return self.down_proj(self.act_fn(gate) * up)           up = up_output.clamp(-self.limit, self.limit)
                                                            return self.down_proj(self.act_fn(gate) * up)

Clamps, scales, casts and activations of the model's own stay as they are written: whatever is computed of two linears of one input is
computed of the halves of one. Where nothing but an activation stands there, `gated_mlp` does more, and what it misses it tells.
"""

from __future__ import annotations

import dataclasses

import torch
from ast_rewrite import Patch
from fx_match import Match, Miss, Trace, any_value, find_all, is_inplace
from torch import fx, nn

from vllm_layers_bridge.fusions.children import (
    linears_above,
    only_input,
    other_use,
    plain_linear,
    require_free_names,
)
from vllm_layers_bridge.fusions.gated_mlp import MERGED, GatedMLP, gate_and_up
from vllm_layers_bridge.fusions.protocol import ModuleFacts
from vllm_layers_bridge.fusions.source import decided_tests, projection_spans, pure_calls, receiver
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import LayerSpec, MergedLinearSpec, Source

PATTERN = any_value("left") * any_value("right")


class GateUp:
    """See the module."""

    name = "gate_up"
    replaces_module = False

    def is_candidate(self, trace: Trace) -> bool:
        """Never: what is missed is missed by `gated_mlp`, which says why."""
        return False

    def match(self, trace: Trace) -> Match | Miss:
        """The first product of what comes from one linear with what comes from another of the same input and width."""
        whole = GatedMLP().match(trace)
        if isinstance(whole, Match):
            return Miss("a gated MLP, which is fused as one", whole.root, whole.captures, whole.nodes, whole.subject)
        if any(node.target is attention_leaf for node in trace.graph.nodes):
            return dataclasses.replace(whole, reason="the forward attends: its linears are for its heads")
        for product in find_all(PATTERN, trace):
            pair = _pair(product, trace)
            if pair is not None:
                gate, up = pair
                captures = {"gate": gate, "up": up, "input": only_input(gate)}
                return dataclasses.replace(product, captures=captures, nodes=pair)
        return dataclasses.replace(whole, reason="no product of two linears of one input")

    def check(self, match: Match, module: nn.Module, facts: ModuleFacts) -> None:
        """Both plain, of one width and type, with a bias each or none, and free names."""
        gate_and_up(match, module)
        require_free_names(module, (MERGED,))

    def rewrite(self, match: Match, trace: Trace, patch: Patch) -> None:
        """One call before the first projection, and its halves where the projections stood."""
        spans = [projection_spans(trace, patch, match[part]) for part in ("gate", "up")]
        patch.hoist(
            [call for call, _ in spans],
            f"{receiver(patch.source)}.{MERGED}({{0}}).chunk(2, dim=-1)",
            ("gate_output", "up_output"),
            [argument for _, argument in spans],
            pure=pure_calls(trace),
            decided=decided_tests(trace, patch),
        )

    def layers(self, match: Match, module: nn.Module, facts: ModuleFacts) -> tuple[LayerSpec, ...]:
        """The merged projection."""
        gate, up = plain_linear(module, match["gate"]), plain_linear(module, match["up"])
        sources = tuple(
            Source(str(match[part].target), shard, linear.out_features)
            for shard, (part, linear) in enumerate((("gate", gate), ("up", up)))
        )
        return (
            MergedLinearSpec(name=MERGED, sources=sources, in_features=gate.in_features, bias=gate.bias is not None),
        )


def _pair(product: Match, trace: Trace) -> tuple[fx.Node, fx.Node] | None:
    """The two linears of a product, in the order in which they run; None where they cannot share a weight."""
    sides = [linears_above(product[side], trace) for side in ("left", "right")]
    if any(len(side) != 1 for side in sides):
        return None
    gate, up = sorted((sides[0][0], sides[1][0]), key=list(trace.graph.nodes).index)
    if gate.target == up.target or only_input(gate) is None or only_input(gate) is not only_input(up):
        return None
    if any(other_use(trace, node) is not None or _is_written(node, trace) for node in (gate, up)):
        return None
    one, other = trace.value(gate), trace.value(up)
    is_same = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape
    return (gate, up) if is_same and not trace.written_by(only_input(gate)) else None


def _is_written(node: fx.Node, trace: Trace) -> bool:
    """Whether the output of a linear is written to in place: what `chunk` gives are views, which may not be where gradients are kept."""
    return bool(trace.written_by(node)) or any(is_inplace(user) for user in node.users)
