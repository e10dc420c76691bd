"""Several calls of the attention interface in one forward: each reaches an attention layer of its own.

    first, _ = attention_interface(self, query, key, value_1, ...)        first, _ = attention_interface(self.attention_call_0, query, ...)
    second, _ = attention_interface(self, query, key, value_2, ...)  ->   second, _ = attention_interface(self.attention_call_1, query, ...)

The interface finds the engine's layer on the module that it is given, and a layer keeps the keys and values of one call alone. The Nth call
in the order of execution gets the Nth holder. A call that runs more than once in a forward would need a layer for each time: refused.
"""

from __future__ import annotations

import ast
import dataclasses

from ast_rewrite import Patch, Refused, SourceSpan
from fx_match import Match, Miss, Trace, any_value, call, find
from torch import fx, nn

from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions.children import require_free_names
from vllm_layers_bridge.fusions.protocol import ModuleFacts
from vllm_layers_bridge.fusions.source import require_same_forward, source_span
from vllm_layers_bridge.seams.leaf import attention_leaf, holder_name
from vllm_layers_bridge.specs import AttentionSpec, LayerSpec

PATTERN = call(attention_leaf)(any_value("module"), any_value("query"), any_value("key"), any_value("value"))


class AttentionCalls:
    """See the module."""

    name = "attention_calls"
    replaces_module = False

    def is_candidate(self, trace: Trace) -> bool:
        """A module that calls the attention interface more than once."""
        return len(attention_nodes(trace)) > 1

    def match(self, trace: Trace) -> Match | Miss:
        """Every call of the attention interface in a forward that was traced to its end."""
        found = find(PATTERN, trace)
        if isinstance(found, Miss):
            return dataclasses.replace(found, reason="the forward does not call the attention interface")
        calls = attention_nodes(trace)
        if len(calls) < 2:
            return _miss(found, "the forward calls the attention interface once")
        if not trace.complete:
            return _miss(
                found, "the forward could not be followed to its end, and may call the attention interface again"
            )
        return dataclasses.replace(found, captures={"calls": calls}, nodes=calls)

    def check(self, match: Match, module: nn.Module, facts: ModuleFacts) -> None:
        """As many calls as were observed of this instance, and free names."""
        calls = len(match["calls"])
        if len(facts.attention) != calls:
            raise NotFusable(
                f"it was seen to call attention {len(facts.attention)} times, and {calls} calls were traced"
            )
        require_free_names(module, tuple(holder_name(at) for at in range(calls)))

    def rewrite(self, match: Match, trace: Trace, patch: Patch) -> None:
        """The module that each call is given becomes the holder of its own layer."""
        require_same_forward(trace, patch)
        spans = [source_span(trace, node) for node in match["calls"]]
        if len(set(spans)) != len(spans):
            raise Refused("one call of the attention interface runs more than once, so that it has no layer of its own")
        receiver = patch.source.receiver
        for at, span in enumerate(spans):
            module = _module_argument(patch, span)
            if not isinstance(module, ast.Name) or receiver is None or module.id != receiver:
                raise Refused(
                    f"the attention interface is given `{ast.unparse(module)}`, expected the module itself", span
                )
            patch.replace(SourceSpan.of(module), f"{receiver}.{holder_name(at)}")

    def layers(self, match: Match, module: nn.Module, facts: ModuleFacts) -> tuple[LayerSpec, ...]:
        """None: attention layers are planned for each call that was observed, and attached to the holders."""
        return ()


def attention_nodes(trace: Trace) -> tuple[fx.Node, ...]:
    """The calls of the attention interface, in the order of execution."""
    return tuple(node for node in trace.graph.nodes if node.target is attention_leaf)


def attention_of(facts: ModuleFacts) -> AttentionSpec:
    """Sizes of the heads that a module's projections are for; NotFusable where it attends not at all, or over heads of two kinds."""
    kinds = {(s.num_heads, s.num_kv_heads, s.head_dim, s.value_head_dim) for s in facts.attention}
    if len(kinds) != 1:
        times = len(facts.attention)
        unlike = ", with heads of other sizes" if kinds else ""
        raise NotFusable(f"it calls attention {times} times in a way that the engine takes{unlike}")
    return facts.attention[0]


def _module_argument(patch: Patch, span: SourceSpan) -> ast.expr:
    expression = patch.source.expression_at(span)
    if not isinstance(expression, ast.Call):
        raise Refused("there is no call where one was traced", span)
    given = expression.args[0] if expression.args else None
    if given is None:
        given = next((keyword.value for keyword in expression.keywords if keyword.arg == "module"), None)
    if given is None or isinstance(given, ast.Starred):
        raise Refused("the call does not spell the module that it gives to the attention interface", span)
    return given


def _miss(found: Match, reason: str) -> Miss:
    return Miss(reason, found.root, found.captures, found.nodes, found.subject)
