"""Gate and up projections of one input in one weight, and the product with the activated gate in one kernel.

    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    down_proj = self.down_proj(self.act_and_mul(self.gate_up_proj(x)))

Which activation it is comes from running it, not from its name. Where the product, the activation and the projections stand in several
statements, the projections are merged and the rest stays:

    gate_output, up_output = self.gate_up_proj(x).chunk(2, dim=-1)
"""

from __future__ import annotations

from typing import Any

from ast_rewrite import Patch
from fx_match import Match, Miss, SourceSpan, Trace, act, any_value, canonical, find, linear
from torch import nn

from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions.protocol import ModuleFacts, argument_span, source_span
from vllm_layers_bridge.layers.activation import FUSED_ACTIVATIONS
from vllm_layers_bridge.specs import ActivationAndMulSpec, LayerSpec, MergedLinearSpec, Source

MERGED = "gate_up_proj"
ACTIVATION = "act_and_mul"

PATTERN = (
    act(*FUSED_ACTIVATIONS, kind="activation")(linear("gate")(any_value("input"))) * linear("up")(any_value("input"))
).contained()


class GatedMLP:
    """See the module."""

    name = "gated_mlp"
    replaces_module = False

    def is_candidate(self, trace: Trace) -> bool:
        """A module with at least three linears of its own that multiplies."""
        linears = [
            node for node in trace.graph.nodes if node.op == "call_module" and type(_child(trace, node)) is nn.Linear
        ]
        has_attention = any("attention" in str(node.target) for node in trace.graph.nodes if node.op == "call_function")
        return len(linears) >= 3 and not has_attention and any(canonical(node) == "mul" for node in trace.graph.nodes)

    def match(self, trace: Trace) -> Match | Miss:
        """The product of an activated linear with another linear of the same input."""
        return find(PATTERN, trace)

    def check(self, match: Match, module: nn.Module, facts: ModuleFacts) -> None:
        """The two must be of one shape, both with a bias or neither, and the names of the new layers free."""
        gate, up = _linear(module, match["gate"]), _linear(module, match["up"])
        if gate is up:
            raise NotFusable("gate and up are one and the same layer")
        if (gate.in_features, gate.out_features) != (up.in_features, up.out_features):
            raise NotFusable(f"gate is {tuple(gate.weight.shape)} and up is {tuple(up.weight.shape)}")
        if (gate.bias is None) != (up.bias is None):
            raise NotFusable("one of gate and up has a bias and the other has none")
        for name in (MERGED, ACTIVATION):
            if hasattr(module, name):
                raise NotFusable(f"the module has an attribute `{name}` already")

    def rewrite(self, match: Match, trace: Trace, patch: Patch) -> None:
        """One expression where it is one; merged projections alone otherwise."""
        gate, up = source_span(trace, match["gate"]), source_span(trace, match["up"])
        inputs = argument_span(patch, gate), argument_span(patch, up)
        if _is_one_expression(match):
            patch.is_value_unchanged(*inputs)
            product = source_span(trace, match.root)
            patch.replace(product, f"self.{ACTIVATION}(self.{MERGED}({{x}}))", x=inputs[0])
        else:
            patch.hoist(
                [gate, up],
                f"self.{MERGED}({{0}}).chunk(2, dim=-1)",
                ("gate_output", "up_output"),
                list(inputs),
            )

    def layers(self, match: Match, module: nn.Module, facts: ModuleFacts) -> tuple[LayerSpec, ...]:
        """The merged projection, and the fused activation where the forward calls it."""
        gate, up = _linear(module, match["gate"]), _linear(module, match["up"])
        merged = MergedLinearSpec(
            name=MERGED,
            sources=(
                Source(str(match["gate"].target), 0, gate.out_features),
                Source(str(match["up"].target), 1, up.out_features),
            ),
            in_features=gate.in_features,
            bias=gate.bias is not None,
        )
        if not _is_one_expression(match):
            return (merged,)
        return (merged, ActivationAndMulSpec(ACTIVATION, match["activation"]))


def _is_one_expression(match: Match) -> bool:
    """Whether product, activation and both projections stand in one expression, and nothing else does."""
    spans = [match.subject.location(node).span for node in match.nodes]
    product = match.subject.location(match.root).span
    if product is None or any(span is None or not _contains(product, span) for span in spans):
        return False
    inside = [
        node
        for node in match.subject.graph.nodes
        if (span := match.subject.location(node).span) is not None and _contains(product, span)
    ]
    return set(inside) <= {*match.nodes, *_ancestors(match["input"])}


def _contains(outer: SourceSpan, inner: SourceSpan) -> bool:
    start = (outer.lineno, outer.col) <= (inner.lineno, inner.col)
    return start and (inner.end_lineno, inner.end_col) <= (outer.end_lineno, outer.end_col)


def _ancestors(node: Any) -> set[Any]:
    seen, stack = set(), [node]
    while stack:
        current = stack.pop()
        if current not in seen:
            seen.add(current)
            stack.extend(current.all_input_nodes)
    return seen


def _child(trace: Trace, node: Any) -> nn.Module | None:
    return dict(trace.module.named_modules()).get(str(node.target))


def _linear(module: nn.Module, node: Any) -> nn.Linear:
    child = module.get_submodule(str(node.target))
    assert isinstance(child, nn.Linear)
    return child
