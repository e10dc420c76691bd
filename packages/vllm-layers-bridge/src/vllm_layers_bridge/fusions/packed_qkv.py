"""Query, key and value in one linear already, one after the other: the same weight, each part sharded by heads.

    qkv = self.qkv_proj(hidden_states)
    query_states = qkv[..., :query_pos]               query_output, key_output, value_output = qkv.split(self.qkv_sizes, dim=-1)
    key_states = qkv[..., query_pos:value_pos]   ->   query_states = query_output
    value_states = qkv[..., value_pos:]               key_states = key_output
                                                      value_states = value_output

A `chunk` or `split` that gives all three keeps its place and is told the sizes. Weights in which the three alternate from head to head, as
in GPT-NeoX, are no such layer and stay as they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ast_rewrite import Patch, Refused
from fx_match import Match, Miss, Trace, any_value, call, canonical, find
from torch import fx, nn

from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions.children import is_any_linear, other_use, require_free_names
from vllm_layers_bridge.fusions.packed import Part, keyword_of, packed_linear, part_of, users_outside
from vllm_layers_bridge.fusions.protocol import ModuleFacts
from vllm_layers_bridge.fusions.source import (
    is_path_known,
    projection_spans,
    pure_calls,
    receiver,
    receiver_span,
    source_span,
)
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import LayerSpec, QKVLinearSpec, Source

SIZES = "qkv_sizes"
PARTS = ("query", "key", "value")

PATTERN = call(attention_leaf)(any_value("module"), any_value("query"), any_value("key"), any_value("value"))


class PackedQKV:
    """See the module."""

    name = "packed_qkv"
    replaces_module = False

    def is_candidate(self, trace: Trace) -> bool:
        """A module that calls the attention interface with what one linear alone gave."""
        found = find(PATTERN, trace)
        if isinstance(found, Miss):
            return False
        linears = [_reached(found[part], trace)[1] for part in PARTS]
        return all(len(names) == 1 for names in linears) and len(set().union(*linears)) == 1

    def match(self, trace: Trace) -> Match | Miss:
        """The attention call, and the run of one linear's output that each of its operands was computed from."""
        found = find(PATTERN, trace)
        if isinstance(found, Miss):
            return dataclasses.replace(found, reason="the forward does not call the attention interface")
        reached = {name: _reached(found[name], trace) for name in PARTS}
        names = set().union(*(linears for _, linears in reached.values()))
        if len(names) != 1:
            shown = ", ".join(f"`{name}`" for name in sorted(names)) or "no linear of this module"
            return _miss(found, found["query"], f"query, key and value come from {shown}, expected one linear")
        for name, (cut, _) in reached.items():
            if len(cut) != 1:
                return _miss(found, found[name], _not_one(name, cut, names.copy().pop()))
        query, key, value = (reached[name][0][0] for name in PARTS)
        packed = query.linear
        runs = [(part.start, part.stop) for part in (query, key, value)]
        if [0, query.stop, key.stop, query.width] != [query.start, key.start, value.start, value.stop]:
            took = ", ".join(f"{start} to {stop}" for start, stop in runs)
            return _miss(found, query.cut, f"they are {took} of {query.width} features, expected one after the other")
        if (use := other_use(trace, packed) or keyword_of(packed)) is not None:
            return _miss(found, *use)
        nodes = frozenset(node for part in (query, key, value) for node in part.nodes)
        taken = frozenset(part.nodes[0] for part in (query, key, value))
        if (escape := users_outside(nodes, taken)) is not None:
            return _miss(found, escape[1], f"the output of `{packed.target}` is used in another way too")
        for node in nodes:
            if writers := trace.written_by(node):
                return _miss(found, writers[0], f"`{node.name}` is written to in place")
        captures = {"packed": packed, "parts": (query, key, value)}
        ordered = tuple(node for node in trace.graph.nodes if node in nodes)
        return dataclasses.replace(found, captures=captures, nodes=ordered)

    def check(self, match: Match, module: nn.Module, facts: ModuleFacts) -> None:
        """Head geometry and names must be what one merged layer can hold."""
        assert match.subject.module is not None
        packed_linear(module, match["packed"], match.subject.module)
        if len(facts.attention) != 1:
            raise NotFusable(f"it calls attention {len(facts.attention)} times in a way that the engine takes")
        spec = facts.attention[0]
        expected = (
            spec.num_heads * spec.head_dim,
            spec.num_kv_heads * spec.head_dim,
            spec.num_kv_heads * spec.value_head_dim,
        )
        found = tuple(part.stop - part.start for part in match["parts"])
        if found != expected:
            raise NotFusable(f"its projection gives {found} features and its attention takes {expected}")
        require_free_names(module, (SIZES,))

    def rewrite(self, match: Match, trace: Trace, patch: Patch) -> None:
        """The cut is told the sizes of one rank; three slices become one cut before the first of them."""
        projection_spans(trace, patch, match["packed"])
        if not is_path_known(trace):
            raise Refused("its statements may take another path than the one that was traced")
        cuts = list(dict.fromkeys(part.cut for part in match["parts"]))
        spans = [source_span(trace, cut) for cut in cuts]
        receivers = [receiver_span(patch, span) for span in spans]
        template = f"{{0}}.split({receiver(patch.source)}.{SIZES}, dim=-1)"
        if len(cuts) == 1:
            patch.replace(spans[0], template.replace("{0}", "{packed}"), packed=receivers[0])
        elif len(cuts) == len(PARTS):
            names = tuple(f"{part}_output" for part in PARTS)
            patch.hoist(spans, template, names, receivers, pure=pure_calls(trace))
        else:
            raise Refused(f"it is cut in {len(cuts)} places, expected one or three")

    def layers(self, match: Match, module: nn.Module, facts: ModuleFacts) -> tuple[LayerSpec, ...]:
        """The linear as three shards; split sizes are an attribute of the module, set when the plan is applied."""
        assert match.subject.module is not None
        packed = packed_linear(module, match["packed"], match.subject.module)
        name = str(match["packed"].target)
        query, key, value = (
            Source(name, shard, part.stop - part.start, (part.start, part.stop), packed.transposed)
            for shard, part in zip("qkv", match["parts"], strict=True)
        )
        spec = facts.attention[0]
        return (
            QKVLinearSpec(
                name=name,
                sources=(query, key, value),
                in_features=packed.in_features,
                bias=packed.bias,
                head_dim=spec.head_dim,
                value_head_dim=spec.value_head_dim,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                sizes_attribute=SIZES,
            ),
        )


def _reached(node: Any, trace: Trace) -> tuple[list[Part], set[str]]:
    """The parts of packed linears that `node` is computed from, and all linears that it is computed from."""
    parts: list[Part] = []
    linears: set[str] = set()
    seen: set[fx.Node] = set()
    stack = [node] if isinstance(node, fx.Node) else []
    while stack:
        current = stack.pop()
        if current in seen or canonical(current) in ("shape", "size") or _reads_shape(current):
            continue
        seen.add(current)
        if (part := part_of(current, trace)) is not None:
            parts.append(part)
            linears.add(str(part.linear.target))
        elif current.op == "call_module" and is_any_linear(trace.module.get_submodule(str(current.target))):
            linears.add(str(current.target))
        else:
            stack.extend(current.all_input_nodes)
    return parts, linears


def _reads_shape(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is getattr


def _not_one(name: str, cut: list[Part], linear: str) -> str:
    if cut:
        return f"the {name} is computed from {len(cut)} parts of `{linear}`, expected one"
    return (
        f"the {name} is no run of the output of `{linear}`: its rows are interleaved, or not cut along the last axis; "
        "a merged layer holds query, key and value one after the other"
    )


def _miss(found: Match, node: Any, reason: str) -> Miss:
    return Miss(reason, node if isinstance(node, fx.Node) else found.root, found.captures, found.nodes, found.subject)
