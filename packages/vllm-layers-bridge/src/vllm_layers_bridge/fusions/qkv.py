"""Query, key and value projections of one input in one weight, sharded by heads.

    query = self.q_proj(hidden_states).view(shape)          query_output, key_output, value_output = self.qkv_proj(hidden_states).split(...)
    key = self.k_proj(hidden_states).view(shape)       ->   query = query_output.view(shape)
    value = self.v_proj(hidden_states).view(shape)          key = key_output.view(shape)
                                                            value = value_output.view(shape)

Key and value may stand in a branch that all instances of the variant take (layers that share keys and values with another have no such
projections; attention that could attend to other states is given none), and read the input under another name; a test whether the module
has a projection is answered. Which projection is the query is read from the graph: the one
from which the attention interface's query was computed, whatever stands between: views, norms, rotary embedding, a branch that leaves it
out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ast_rewrite import Patch
from fx_match import Match, Miss, Trace, any_value, call, find, find_all
from torch import fx, nn

from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions.attention_calls import attention_of
from vllm_layers_bridge.fusions.children import (
    linears_above,
    only_input,
    other_use,
    plain_linear,
    require_free_names,
    require_mergeable,
)
from vllm_layers_bridge.fusions.protocol import ModuleFacts
from vllm_layers_bridge.fusions.settled import Settled
from vllm_layers_bridge.fusions.source import decided_tests, projection_spans, pure_calls, receiver, settle_presence
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
        """A module that calls the attention interface with what two linears or more give; one alone is packed already."""
        found = find(PATTERN, trace)
        if isinstance(found, Miss):
            return False
        return len({node.target for part in PARTS for node in linears_above(found[part], trace)}) > 1

    def match(self, trace: Trace) -> Match | Miss:
        """The attention calls, and for each of their operands the one linear that it was computed from."""
        found = find(PATTERN, trace)
        if isinstance(found, Miss):
            return dataclasses.replace(found, reason="the forward does not call the attention interface")
        nodes: dict[str, fx.Node] = {}
        for attention in find_all(PATTERN, trace):
            for part in PARTS:
                given = attention[part]
                reached = linears_above(given, trace)
                if len(reached) != 1:
                    return _miss(found, given, _not_one(part, reached))
                if nodes.setdefault(part, reached[0]) is not reached[0]:
                    known = nodes[part].target
                    return _miss(
                        found,
                        given,
                        f"the {part} of one call comes from `{known}` and of another from `{reached[0].target}`",
                    )
        query = nodes["query"]
        for part, node in nodes.items():
            same = next((other for other in PARTS if other != part and nodes[other].target == node.target), None)
            if same is not None:
                return _miss(found, node, f"{part} and {same} both come from `{node.target}`, expected three linears")
            if only_input(node) is None or only_input(node) is not only_input(query):
                reason = f"`{node.target}` reads another input than `{query.target}`, so they cannot share one weight"
                return _miss(found, node, reason)
            if (use := other_use(trace, node)) is not None:
                return _miss(found, *use)
            if writers := trace.written_by(node):
                return _miss(found, writers[0], f"the output of `{node.target}` is written to in place")
        given = only_input(query)
        if writers := trace.written_by(given):
            return _miss(found, writers[0], "the input of the projections is written to in place")
        captures = {**nodes, "input": given}
        return dataclasses.replace(found, captures=captures, nodes=tuple(nodes.values()))

    def check(self, match: Match, module: nn.Module, facts: ModuleFacts) -> None:
        """Head geometry, biases and names must be what one merged layer can hold."""
        linears = tuple(plain_linear(module, match[part]) for part in PARTS)
        spec = attention_of(facts)
        expected = (
            spec.num_heads * spec.head_dim,
            spec.num_kv_heads * spec.head_dim,
            spec.num_kv_heads * spec.value_head_dim,
        )
        found = tuple(linear.out_features for linear in linears)
        if found != expected:
            raise NotFusable(f"its projections give {found} features and its attention takes {expected}")
        require_mergeable(tuple(str(match[part].target) for part in PARTS), linears)
        require_free_names(module, (MERGED, SIZES))

    def rewrite(self, match: Match, trace: Trace, patch: Patch) -> None:
        """Hoist one call before the first projection, and read the three parts where the projections stood."""
        spans = [projection_spans(trace, patch, match[part], settles_presence=True) for part in PARTS]
        me, settled, is_decided = receiver(patch.source), Settled(trace, patch), decided_tests(trace, patch)
        patch.hoist(
            [call for call, _ in spans],
            f"{me}.{MERGED}({{0}}).split({me}.{SIZES}, dim=-1)",
            tuple(f"{part}_output" for part in PARTS),
            [settled.origin(argument) for _, argument in spans],
            pure=pure_calls(trace),
            decided=lambda test: is_decided(test) or settled.truth(test) is not None,
            named={argument: origin for _, argument in spans if (origin := settled.origin(argument)) != argument},
        )
        for part in PARTS:
            settle_presence(patch, str(match[part].target))

    def layers(self, match: Match, module: nn.Module, facts: ModuleFacts) -> tuple[LayerSpec, ...]:
        """The merged projection; split sizes are an attribute of the module, set when the plan is applied."""
        linears = [plain_linear(module, match[part]) for part in PARTS]
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


def _not_one(part: str, reached: list[fx.Node]) -> str:
    if not reached:
        return f"the {part} comes from no linear of this module: it is shared from elsewhere, or packed"
    names = ", ".join(f"`{node.target}`" for node in reached)
    return f"the {part} is computed from {len(reached)} linears ({names}), expected one"


def _miss(found: Match, node: Any, reason: str) -> Miss:
    return Miss(
        reason=reason,
        node=node if isinstance(node, fx.Node) else found.root,
        captures=found.captures,
        nodes=found.nodes,
        subject=found.subject,
    )
