"""Query, key and value projections of one input in one weight, sharded by heads.

    query = self.q_proj(hidden_states).view(shape)          query_output, key_output, value_output = self.qkv_proj(hidden_states).split(...)
    key = self.k_proj(hidden_states).view(shape)       ->   query = query_output.view(shape)
    value = self.v_proj(hidden_states).view(shape)          key = key_output.view(shape)
                                                            value = value_output.view(shape)

Which projection is the query is read from the graph: the one from which the attention interface's query was computed, whatever
stands between: views, norms, rotary embedding, a branch that leaves it out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ast_rewrite import Patch
from fx_match import Match, Miss, Trace, any_value, call, find
from torch import fx, nn

from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions.protocol import ModuleFacts, argument_span, is_plain_linear, source_span
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import LayerSpec, QKVLinearSpec, Source

MERGED = "qkv_proj"
SIZES = "qkv_sizes"
PARTS = ("query", "key", "value")

PATTERN = call(attention_leaf)(any_value("module"), any_value("query"), any_value("key"), any_value("value"))


class QKV:
    """See the module."""

    name = "qkv"
    replaces_module = False

    def is_candidate(self, trace: Trace) -> bool:
        """A module that calls the attention interface."""
        return any(node.target is attention_leaf for node in trace.graph.nodes)

    def match(self, trace: Trace) -> Match | Miss:
        """The attention call, and for each of its operands the one linear that it was computed from."""
        found = find(PATTERN, trace)
        if isinstance(found, Miss):
            return found
        nodes: list[fx.Node] = []
        for part in PARTS:
            reached = _linears_of(found[part], trace)
            if len(reached) != 1:
                names = ", ".join(str(node.target) for node in reached) or "none"
                return _miss(
                    found, found[part], f"the {part} is computed from {len(reached)} linears ({names}), not from one"
                )
            nodes.append(reached[0])
        query, key, value = nodes
        if len({node.target for node in nodes}) != 3:
            return _miss(found, key, "query, key and value do not come from three linears")
        for node in nodes:
            if node.all_input_nodes != query.all_input_nodes or len(node.args) != 1:
                return _miss(found, node, f"`{node.target}` reads another input than `{query.target}`")
            calls = [other for other in trace.graph.nodes if other.op == "call_module" and other.target == node.target]
            if len(calls) != 1:
                return _miss(found, node, f"`{node.target}` is called {len(calls)} times")
            if trace.written_by(node):
                return _miss(found, node, f"the output of `{node.target}` is written to in place")
        captures = {"query": query, "key": key, "value": value, "input": query.args[0]}
        return dataclasses.replace(found, captures=captures, nodes=tuple(nodes))

    def check(self, match: Match, module: nn.Module, facts: ModuleFacts) -> None:
        """Head geometry, biases and names must be what one merged layer can hold."""
        query, key, value = (_linear(module, match[part]) for part in PARTS)
        if len(facts.attention) != 1:
            raise NotFusable(f"it calls attention {len(facts.attention)} times in a way that the engine takes")
        spec = facts.attention[0]
        expected = (
            spec.num_heads * spec.head_dim,
            spec.num_kv_heads * spec.head_dim,
            spec.num_kv_heads * spec.value_head_dim,
        )
        found = (query.out_features, key.out_features, value.out_features)
        if found != expected:
            raise NotFusable(f"its projections give {found} features and its attention takes {expected}")
        if len({linear.bias is None for linear in (query, key, value)}) != 1:
            raise NotFusable("some of query, key and value have a bias and some have none")
        for name in (MERGED, SIZES):
            if hasattr(module, name):
                raise NotFusable(f"the module has an attribute `{name}` already")

    def rewrite(self, match: Match, trace: Trace, patch: Patch) -> None:
        """Hoist one call before the first projection, and read the three parts where the projections stood."""
        spans = [source_span(trace, match[part]) for part in PARTS]
        patch.hoist(
            spans,
            f"self.{MERGED}({{0}}).split(self.{SIZES}, dim=-1)",
            tuple(f"{part}_output" for part in PARTS),
            [argument_span(patch, span) for span in spans],
        )

    def layers(self, match: Match, module: nn.Module, facts: ModuleFacts) -> tuple[LayerSpec, ...]:
        """The merged projection; split sizes are an attribute of the module, set when the plan is applied."""
        linears = [_linear(module, match[part]) for part in PARTS]
        query, key, value = (
            Source(str(match[part].target), part[0], linear.out_features)
            for part, linear in zip(PARTS, linears, strict=True)
        )
        spec = facts.attention[0]
        return (
            QKVLinearSpec(
                name=MERGED,
                sources=(query, key, value),
                in_features=linears[0].in_features,
                bias=linears[0].bias is not None,
                head_dim=spec.head_dim,
                value_head_dim=spec.value_head_dim,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                sizes_attribute=SIZES,
            ),
        )


def _linears_of(node: Any, trace: Trace) -> list[fx.Node]:
    """Plain linears nearest above `node` on every path."""
    found: list[fx.Node] = []
    seen: set[fx.Node] = set()
    stack: list[fx.Node] = [node]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op == "call_module" and is_plain_linear(trace.module.get_submodule(str(current.target))):
            found.append(current)
        else:
            stack.extend(current.all_input_nodes)
    return found


def _miss(found: Match, node: fx.Node, reason: str) -> Miss:
    return Miss(reason=reason, node=node, captures=found.captures, nodes=found.nodes, subject=found.subject)


def _linear(module: nn.Module, node: Any) -> nn.Linear:
    child = module.get_submodule(str(node.target))
    assert isinstance(child, nn.Linear)
    return child
