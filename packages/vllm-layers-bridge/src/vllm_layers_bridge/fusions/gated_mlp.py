"""Gate and up projections of one input in one weight, and the product with the activated gate in one kernel.

    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    down_proj = self.down_proj(self.act_and_mul(self.gate_up_proj(x)))

Which activation it is comes from running it, not from its name. Projections, activation and product may stand in several statements. Where
vLLM has no fused layer for the activation, or a statement does more than its part, the projections are merged and the rest stays:

    gate_output, up_output = self.gate_up_proj(x).chunk(2, dim=-1)
"""

from __future__ import annotations

import dataclasses

from ast_rewrite import FunctionSource, Patch, RewriteError, SourceSpan
from fx_match import Match, Miss, Trace, act, any_value, find, module
from torch import nn

from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions.children import (
    activation_of,
    other_use,
    plain_linear,
    require_free_names,
    require_mergeable,
)
from vllm_layers_bridge.fusions.gated_mlp_misses import explain, is_product_of_two
from vllm_layers_bridge.fusions.protocol import ModuleFacts, is_plain_linear
from vllm_layers_bridge.fusions.source import (
    argument_span,
    projection_spans,
    pure_calls,
    receiver,
    source_span,
    stands_for_itself,
)
from vllm_layers_bridge.fusions.statements import gather
from vllm_layers_bridge.layers.activation import FUSED_ACTIVATIONS
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import ActivationAndMulSpec, LayerSpec, MergedLinearSpec, Source

MERGED = "gate_up_proj"
ACTIVATION = "act_and_mul"
RESULT = "gated_output"
FORM = "form"
"""Capture that says what is rewritten: "expression", "statements", or "projections" alone."""

_GATE = act(kind="activation", name="activated")(module(is_plain_linear, "gate")(any_value("input")))
PATTERN = (_GATE * module(is_plain_linear, "up")(any_value("input"))).contained()


class GatedMLP:
    """See the module."""

    name = "gated_mlp"
    replaces_module = False

    def is_candidate(self, trace: Trace) -> bool:
        """A module without attention that multiplies what comes from one linear alone with what comes from another alone."""
        if any(node.target is attention_leaf for node in trace.graph.nodes):
            return False
        return any(is_product_of_two(node, trace) for node in trace.graph.nodes)

    def match(self, trace: Trace) -> Match | Miss:
        """The product of an activated linear with another linear of the same input."""
        found = find(PATTERN, trace)
        if isinstance(found, Miss):
            return explain(found, trace)
        if found["gate"] is found["up"]:
            return explain(Miss("gate and up are one", found.root, found.captures, found.nodes, found.subject), trace)
        for part in ("gate", "up"):
            if (use := other_use(trace, found[part])) is not None:
                return Miss(use[1], use[0], found.captures, found.nodes, found.subject)
        captures = {**found.captures, FORM: _form(found, trace)}
        return dataclasses.replace(found, captures=captures)

    def check(self, match: Match, module: nn.Module, facts: ModuleFacts) -> None:
        """Both plain, of one shape, with a bias each or none, an activation that can be fused, and free names."""
        gate_and_up(match, module)
        activation = activation_of(module, match["activated"], match["activation"])
        if match[FORM] != "projections" and activation not in FUSED_ACTIVATIONS:
            raise NotFusable(
                f"its activation is {activation or 'none that is known'}, which vLLM has no fused layer for"
            )
        require_free_names(module, (MERGED, ACTIVATION))

    def rewrite(self, match: Match, trace: Trace, patch: Patch) -> None:
        """The product becomes one call, from one expression or from several statements; or the projections do."""
        (gate, gate_input), (up, up_input) = (projection_spans(trace, patch, match[part]) for part in ("gate", "up"))
        me = receiver(patch.source)
        if match[FORM] == "expression":
            patch.is_value_unchanged(gate_input, up_input, pure=pure_calls(trace))
            product = source_span(trace, match.root)
            patch.replace(product, f"{me}.{ACTIVATION}({me}.{MERGED}({{x}}))", x=gate_input)
        elif match[FORM] == "statements":
            _gather(match, trace, patch, min((gate, gate_input), (up, up_input))[1])
        else:
            patch.hoist(
                [gate, up],
                f"{me}.{MERGED}({{0}}).chunk(2, dim=-1)",
                ("gate_output", "up_output"),
                [gate_input, up_input],
                pure=pure_calls(trace),
            )

    def layers(self, match: Match, module: nn.Module, facts: ModuleFacts) -> tuple[LayerSpec, ...]:
        """The merged projection, and the fused activation where the forward calls it."""
        gate, up = plain_linear(module, match["gate"]), plain_linear(module, match["up"])
        merged = MergedLinearSpec(
            name=MERGED,
            sources=(
                Source(str(match["gate"].target), 0, gate.out_features),
                Source(str(match["up"].target), 1, up.out_features),
            ),
            in_features=gate.in_features,
            bias=gate.bias is not None,
        )
        activation = activation_of(module, match["activated"], match["activation"])
        if match[FORM] == "projections" or activation is None:
            return (merged,)
        return (merged, ActivationAndMulSpec(ACTIVATION, activation))


def gate_and_up(match: Match, module: nn.Module) -> tuple[nn.Linear, nn.Linear]:
    """The two linears of an instance; NotFusable unless both are plain, of one width and type, with a bias each or none."""
    gate, up = plain_linear(module, match["gate"]), plain_linear(module, match["up"])
    names = str(match["gate"].target), str(match["up"].target)
    require_mergeable(names, (gate, up))
    if gate.out_features != up.out_features:
        raise NotFusable(f"`{names[0]}` gives {gate.out_features} features and `{names[1]}` {up.out_features}")
    return gate, up


def _form(match: Match, trace: Trace) -> str:
    """What can be rewritten; that it cannot at all is for `rewrite` to tell."""
    if match["activation"] not in FUSED_ACTIVATIONS:
        return "projections"
    if _is_one_expression(match, trace):
        return "expression"
    try:
        patch = Patch(FunctionSource.of(trace.module_class.forward))
        inputs = [argument_span(patch, source_span(trace, match[part])) for part in ("gate", "up")]
        _gather(match, trace, patch, min(inputs))
        patch.result()
    except RewriteError:
        return "projections"
    return "statements"


def _gather(match: Match, trace: Trace, patch: Patch, given: SourceSpan) -> None:
    nodes = (match["gate"], match["up"], match["activated"])
    me = receiver(patch.source)
    gather(trace, patch, match.root, nodes, f"{me}.{ACTIVATION}({me}.{MERGED}({{0}}))", RESULT, given)


def _is_one_expression(match: Match, trace: Trace) -> bool:
    """Whether one expression of the forward is the product of activated gate and up, whatever path leads to it."""
    try:
        source = FunctionSource.of(trace.module_class.forward)
        patch = Patch(source)
        spans = {node: source.normalised(source_span(trace, node)) for node in match.nodes}
        inputs = tuple(argument_span(patch, spans[match[part]]) for part in ("gate", "up"))
    except RewriteError:
        return False  # whether it can be rewritten at all, `rewrite` tells
    product = spans[match.root]
    return all(product.contains(span) for span in spans.values()) and stands_for_itself(source, product, inputs)
