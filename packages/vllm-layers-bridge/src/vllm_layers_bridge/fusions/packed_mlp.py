"""Gate and up in one linear already: the product with the activated gate in one kernel, each half sharded for itself.

    up_states = self.gate_up_proj(hidden_states)               up_states = self.gate_up_proj(hidden_states)
    gate, up_states = up_states.chunk(2, dim=-1)          ->   gated_output = self.act_and_mul(up_states)
    up_states = up_states * self.activation_fn(gate)           up_states = gated_output

Which half is the gate is read from the graph: it is the one that is activated. Where it lies second in the checkpoint, it is loaded first.
"""

from __future__ import annotations

import ast
import dataclasses

from ast_rewrite import Patch, Refused, SourceSpan
from fx_match import Match, Miss, Subject, Trace, act, any_value, canonical, find_all
from torch import fx, nn

from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions.children import activation_of, other_use, require_free_names
from vllm_layers_bridge.fusions.packed import Part, keyword_of, packed_linear, part_of, users_outside
from vllm_layers_bridge.fusions.protocol import ModuleFacts
from vllm_layers_bridge.fusions.source import (
    is_path_known,
    projection_spans,
    receiver,
    receiver_span,
    require_nothing_lost,
    source_span,
)
from vllm_layers_bridge.fusions.statements import gather
from vllm_layers_bridge.layers.activation import FUSED_ACTIVATIONS
from vllm_layers_bridge.specs import ActivationAndMulSpec, LayerSpec, MergedLinearSpec, Source

ACTIVATION = "act_and_mul"
RESULT = "gated_output"
PARTS = ("gate", "up")

PATTERN = act(kind="activation", name="activated")(any_value("gate")) * any_value("up")


class PackedGatedMLP:
    """See the module."""

    name = "packed_gated_mlp"
    replaces_module = False

    def is_candidate(self, trace: Trace) -> bool:
        """A module that multiplies one part of a linear's output with the activation of another part of it."""
        return _product(trace) is not None

    def match(self, trace: Trace) -> Match | Miss:
        """The product of a half of a linear's output with the activated other half."""
        found = _product(trace)
        if found is None:
            reason = "it does not multiply one part of a linear's output with the activation of another part of it"
            return Miss(reason, None, {}, (), Subject.of(trace))
        match, parts = found
        gate, up = parts
        width = gate.width
        if match["activation"] not in FUSED_ACTIVATIONS:
            fused = ", ".join(sorted(FUSED_ACTIVATIONS))
            return _miss(
                match, match["activated"], f"the activation is {match['activation']}; vLLM's fused layers have {fused}"
            )
        halves = {(0, width // 2), (width // 2, width)}
        if width % 2 or {(gate.start, gate.stop), (up.start, up.stop)} != halves:
            took = f"{gate.start} to {gate.stop} and {up.start} to {up.stop}"
            return _miss(match, gate.cut, f"it takes {took} of {width} features, expected the two halves")
        if (use := other_use(trace, gate.linear) or keyword_of(gate.linear)) is not None:
            return _miss(match, *use)
        nodes = frozenset({*match.nodes, *gate.nodes, *up.nodes})
        if (escape := users_outside(nodes, frozenset({match.root}))) is not None:
            return _miss(match, escape[1], f"`{canonical(escape[0])}` is used outside of the product too")
        for node in (*nodes, gate.linear.args[0] if gate.linear.args else None):
            if isinstance(node, fx.Node) and (writers := trace.written_by(node)):
                return _miss(match, writers[0], f"`{node.name}` is written to in place")
        captures = {**match.captures, "packed": gate.linear, "gate_part": gate, "up_part": up}
        ordered = tuple(node for node in trace.graph.nodes if node in nodes)
        return dataclasses.replace(match, captures=captures, nodes=ordered)

    def check(self, match: Match, module: nn.Module, facts: ModuleFacts) -> None:
        """The linear of the size that was traced, an activation that can be fused, and a free name."""
        assert match.subject.module is not None
        packed_linear(module, match["packed"], match.subject.module)
        activation = activation_of(module, match["activated"], match["activation"])
        if activation not in FUSED_ACTIVATIONS:
            raise NotFusable(
                f"its activation is {activation or 'none that is known'}, which vLLM has no fused layer for"
            )
        require_free_names(module, (ACTIVATION,))

    def rewrite(self, match: Match, trace: Trace, patch: Patch) -> None:
        """The product becomes a call; the projection stays, and what cut it up goes."""
        call, argument = projection_spans(trace, patch, match["packed"])
        product = source_span(trace, match.root)
        cuts = sorted({source_span(trace, match[part].cut) for part in ("gate_part", "up_part")})
        given, template = _receiver(patch, cuts[0], call, argument)
        if all(product.contains(cut) for cut in cuts):
            if not is_path_known(trace):
                raise Refused("its statements may take another path than the one that was traced")
            require_nothing_lost(trace, patch, product, given)
            patch.replace(product, template.replace("{0}", "{packed}"), packed=given)
            return
        nodes = [match["activated"], match["gate_part"].cut, match["up_part"].cut]
        gather(trace, patch, match.root, nodes, template, RESULT, given)

    def layers(self, match: Match, module: nn.Module, facts: ModuleFacts) -> tuple[LayerSpec, ...]:
        """The linear as two shards, gate first, and the fused activation."""
        assert match.subject.module is not None
        packed = packed_linear(module, match["packed"], match.subject.module)
        name = str(match["packed"].target)
        sources = tuple(
            Source(name, shard, part.stop - part.start, (part.start, part.stop), packed.transposed)
            for shard, part in enumerate((match["gate_part"], match["up_part"]))
        )
        activation = activation_of(module, match["activated"], match["activation"])
        assert activation is not None
        return (
            MergedLinearSpec(name, sources, packed.in_features, packed.bias),
            ActivationAndMulSpec(ACTIVATION, activation),
        )


def _product(trace: Trace) -> tuple[Match, tuple[Part, Part]] | None:
    """The first product of a part of a linear's output with the activation of another part of the same."""
    for match in find_all(PATTERN, trace):
        parts = [part_of(match[part], trace) if isinstance(match[part], fx.Node) else None for part in PARTS]
        gate, up = parts
        if gate is None or up is None or gate.linear is not up.linear:
            continue
        if gate.source is gate.linear and up.source is up.linear:
            return match, (gate, up)
    return None


def _receiver(patch: Patch, cut: SourceSpan, call: SourceSpan, argument: SourceSpan) -> tuple[SourceSpan, str]:
    """What is cut, as an input for a new statement, and the text that computes the product from it."""
    me, span = receiver(patch.source), receiver_span(patch, cut)
    if span == call:
        func = patch.source.expression_at(call)
        assert isinstance(func, ast.Call)
        return argument, f"{me}.{ACTIVATION}({ast.unparse(func.func)}({{0}}))"
    return span, f"{me}.{ACTIVATION}({{0}})"


def _miss(match: Match, node: fx.Node, reason: str) -> Miss:
    return Miss(reason, node, match.captures, match.nodes, match.subject)
