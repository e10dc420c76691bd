"""Keys and values that all heads are made of are cached in place of the keys and values themselves.

    key_states, value_states = self.expand_kv(kv_nope, k_rot)      ->      key_states, value_states = (k_rot, kv_nope)

In multi-head latent attention one linear makes the keys and the values of all heads from a narrow latent; the keys share some features
beside it, those with the rotary embedding. vLLM's latent attention (MLA) takes the latent and the shared features, caches them alone, and
works with the linear's weight. Where the forward leaves the expansion to one call of a method of its module, that call gives way to what it
was given. That the method computes just what vLLM's layer assumes is not read from its text: it is run, with numbers, and compared.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
from typing import Any

import fx_match
import torch
from ast_rewrite import FunctionSource, Patch, Refused, RewriteError, SourceSpan
from fx_match import Match, Miss, Trace, any_value, call, canonical, find
from torch import fx, nn

from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions.attention_calls import attention_nodes
from vllm_layers_bridge.fusions.children import linears_above, only_input, other_use, plain_linear
from vllm_layers_bridge.fusions.protocol import ModuleFacts
from vllm_layers_bridge.fusions.source import own_span, receiver, require_same_forward
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import LatentSpec, LayerSpec

PATTERN = call(attention_leaf)(any_value("module"), any_value("query"))
"""Key and value are left open: the method may write a key in place, piece by piece, which is as good."""

_TOKENS = 3
_TOLERANCE = 1e-5
"""Norm of the difference over norm, in float32."""


class LatentAttention:
    """See the module. Takes the sizes (features of the latent, shared features) that the engine's latent attention takes."""

    name = "latent_attention"
    replaces_module = False

    def __init__(self, sizes: tuple[tuple[int, int], ...]) -> None:
        self._sizes = sizes

    def is_candidate(self, trace: Trace) -> bool:
        """A module whose keys and values are made of a latent of sizes that the engine takes."""
        spec = latent_sizes(trace, trace.module)
        return spec is not None and (spec.rank, spec.rope) in self._sizes

    def match(self, trace: Trace) -> Match | Miss:
        """One method that was given the latent and the shared features, and gave key and value, as vLLM's layer computes them."""
        found = find(PATTERN, trace)
        if isinstance(found, Miss):
            return dataclasses.replace(found, reason="the forward does not call the attention interface")
        spec = latent_sizes(trace, trace.module)
        if spec is None:
            return _miss(found, "keys and values are not made of a latent")
        if (spec.rank, spec.rope) not in self._sizes:
            return _miss(found, f"the engine takes no latent of {spec.rank} with {spec.rope} shared features")
        if not trace.complete:
            return _miss(found, "the forward could not be followed to its end")
        inside = _expansion(trace, spec)
        if isinstance(inside, str):
            return _miss(found, inside)
        _, _, key, value = attention_nodes(trace)[0].args[:4]
        order = _order(trace, spec, inside, key, value)
        if isinstance(order, str):
            return _miss(found, order)
        captures = {"spec": spec, "projection": inside.projection, "order": order}
        return dataclasses.replace(found, captures=captures, nodes=(inside.projection,))

    def check(self, match: Match, module: nn.Module, facts: ModuleFacts) -> None:
        """Plain attention over whole heads, and a linear without bias of their sizes."""
        spec: LatentSpec = match["spec"]
        linear = plain_linear(module, match["projection"])
        if linear.bias is not None:
            raise NotFusable(f"its `{spec.projection}` has a bias, which latent attention does not add")
        if len(facts.attention) != 1:
            raise NotFusable(f"it was seen to call attention {len(facts.attention)} times")
        (heads,) = facts.attention
        if heads.sliding_window is not None or heads.logits_soft_cap is not None or heads.sinks is not None:
            raise NotFusable("latent attention has no window, no cap and no sinks")
        width = heads.head_dim - spec.rope + heads.value_head_dim
        if heads.num_kv_heads != heads.num_heads or linear.out_features != heads.num_heads * width:
            raise NotFusable(f"its `{spec.projection}` does not give a key and a value for each head of the queries")

    def rewrite(self, match: Match, trace: Trace, patch: Patch) -> None:
        """The call of the method becomes what it was given, shared features first: key and value of the latent attention."""
        require_same_forward(trace, patch)
        if (use := other_use(trace, match["projection"])) is not None:
            raise Refused(use[1])
        span = trace.span(match["projection"])
        assert span is not None, "what was matched has a place"
        own = own_span(span)
        made = patch.source.expression_at(own)
        assert isinstance(made, ast.Call)
        order: _Order = match["order"]
        latent, shared = (SourceSpan.of(made.args[at]) for at in (order.latent, 1 - order.latent))
        template = "({shared}, {latent})" if order.key == 0 else "({latent}, {shared})"
        patch.replace(own, template, shared=shared, latent=latent)

    def layers(self, match: Match, module: nn.Module, facts: ModuleFacts) -> tuple[LayerSpec, ...]:
        """None: the attention layer is attached when the plan is applied, and the linear stays the module's."""
        return ()


def latent_sizes(trace: Trace, module: nn.Module) -> LatentSpec | None:
    """The linear that makes keys and values of all heads from a narrower latent, and its sizes; None where there is none."""
    calls = [node for node in trace.graph.nodes if node.target is attention_leaf]
    if len(calls) != 1 or len(calls[0].args) < 4:
        return None
    _, _, key, value = calls[0].args[:4]
    expands, compresses = _linears(value, trace), frozenset[fx.Node]()
    if len(expands) == 1:
        compresses = _linears(only_input(next(iter(expands))), trace)
    if len(compresses) != 1 or _linears(key, trace) != expands | compresses:
        return None
    rank, whole = _width(module, expands, "in_features"), _width(module, compresses, "out_features")
    (projection,) = expands
    return LatentSpec(str(projection.target), rank, whole - rank) if 0 < rank < whole else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Expansion:
    """A call of `method` in the forward, in which `projection` is called on the `latent`; `shared` is the other value that it was given."""

    method: str
    projection: fx.Node
    latent: fx.Node
    shared: fx.Node


@dataclasses.dataclass(frozen=True, slots=True)
class _Order:
    """Which argument of the method is the latent, and which of its results the key: 0 or 1."""

    latent: int
    key: int


def _expansion(trace: Trace, spec: LatentSpec) -> _Expansion | str:
    """The call in which keys and values are made, or why there is not one."""
    (projection,) = (node for node in trace.graph.nodes if node.op == "call_module" and node.target == spec.projection)
    span = trace.span(projection)
    method = _method(trace, span) if span is not None else None
    if method is None:
        return f"`{spec.projection}` is not called in a method of its module that is given two names"
    inside: set[fx.Node] = set()
    for node in trace.graph.nodes:
        given = set(node.all_input_nodes)
        is_part = trace.span(node) is None and node.op != "output" and bool(given) and given <= inside
        if trace.span(node) == span or is_part:  # a part of a tuple has no place of its own
            inside.add(node)
    (attention,) = attention_nodes(trace)
    leaving = {user for node in inside for user in node.users} - inside
    if not set(attention.args[2:4]) <= inside or leaving != {attention}:
        return f"`{method}` gives more, or less, than the key and the value of the attention"
    outer = {node for made in inside for node in made.all_input_nodes} - inside
    latent = only_input(projection)
    if latent not in outer or len(outer) != 2:
        return f"`{method}` is not given a latent for `{spec.projection}` and shared features alone"
    (shared,) = outer - {latent}
    return _Expansion(method, projection, latent, shared)


def _method(trace: Trace, span: fx_match.SourceSpan) -> str | None:
    """``expand`` where the forward has ``self.expand(latent, shared)`` at `span`."""
    try:
        source = FunctionSource.of(trace.module_class.forward)
        call = source.expression_at(own_span(span))
    except RewriteError:
        return None
    if (
        not isinstance(call, ast.Call)
        or call.keywords
        or len(call.args) != 2
        or not isinstance(call.func, ast.Attribute)
    ):
        return None
    is_of_names = all(isinstance(given, ast.Name) for given in call.args)
    is_own = ast.unparse(call.func.value) == receiver(source)
    return call.func.attr if is_of_names and is_own else None


def _order(trace: Trace, spec: LatentSpec, made: _Expansion, key: Any, value: Any) -> _Order | str:
    """Run the method with numbers: in which order it takes its arguments and gives its results; or that it computes something else."""
    values = [trace.value(node) for node in (made.latent, made.shared, key, value)]
    shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]
    if len(shapes) != len(values):
        return f"`{made.method}` is given, or gives, something that is no tensor"
    if (
        shapes[0][:2] != (1, 1)
        or shapes[1][:2] != (1, 1)
        or shapes[0][3:] != (spec.rank,)
        or shapes[1][3:] != (spec.rope,)
    ):
        return f"`{made.method}` is given {shapes[0]} and {shapes[1]}, expected one head of each"
    heads, width, value_width = shapes[2][1], shapes[2][3], shapes[3][3]
    draw = torch.Generator().manual_seed(0)
    linear = nn.Linear(
        spec.rank, heads * (width - spec.rope + value_width), bias=False, device="cpu", dtype=torch.float32
    )
    with torch.no_grad():
        linear.weight.copy_(
            torch.randn(linear.weight.shape, generator=draw, dtype=torch.float32, device="cpu") / spec.rank**0.5
        )
    latent = torch.randn(1, 1, _TOKENS, spec.rank, generator=draw, dtype=torch.float32, device="cpu")
    shared = torch.randn(1, 1, _TOKENS, spec.rope, generator=draw, dtype=torch.float32, device="cpu")
    stand_in = copy.copy(trace.module)
    stand_in.__dict__["_modules"] = {**trace.module._modules, spec.projection: linear}
    with torch.no_grad():
        parts = linear(latent[0, 0]).view(1, _TOKENS, heads, -1).transpose(1, 2)
        expected = (
            torch.cat((parts[..., : width - spec.rope], shared.expand(1, heads, -1, -1)), dim=-1),
            parts[..., width - spec.rope :],
        )
        for at, given in enumerate(((latent, shared), (shared, latent))):
            try:
                results = getattr(stand_in, made.method)(*given)
            except Exception:  # the module's own code, given its arguments in the other order
                continue
            for first in (0, 1):
                if _are_close(results, expected if first == 0 else expected[::-1]):
                    return _Order(at, first)
    return f"`{made.method}` computes other keys and values than latent attention does"


def _are_close(found: Any, expected: tuple[torch.Tensor, ...]) -> bool:
    if not isinstance(found, tuple) or len(found) != len(expected):
        return False
    return all(
        isinstance(a, torch.Tensor) and a.shape == b.shape and bool((a - b).norm() <= _TOLERANCE * b.norm())
        for a, b in zip(found, expected, strict=True)
    )


def _linears(node: Any, trace: Trace) -> frozenset[fx.Node]:
    """Plain linears nearest above `node`, through what was written into a value as well."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    stack = [node] if isinstance(node, fx.Node) else []
    while stack:
        current = stack.pop()
        if current in seen or canonical(current) in ("shape", "size"):  # no number flows there
            continue
        seen.add(current)
        found.update(linears_above(current, trace))
        stack += [given for writer in trace.written_by(current) for given in writer.all_input_nodes]
        if current.op != "call_module":
            stack += current.all_input_nodes
    return frozenset(found)


def _width(module: nn.Module, linears: frozenset[fx.Node], name: str) -> int:
    (linear,) = linears
    return int(getattr(module.get_submodule(str(linear.target)), name))


def _miss(found: Match, reason: str) -> Miss:
    return Miss(reason, found.root, found.captures, found.nodes, found.subject)
