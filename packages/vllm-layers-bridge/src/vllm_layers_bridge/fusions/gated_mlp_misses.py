"""Why a product is no gated MLP, in a sentence about the layers that its author wrote.

In: the miss of the pattern, which speaks of nodes, and the trace. Out: a miss whose reason names the two linears and what stands in
the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fx_match import Miss, Trace, activation, canonical, is_inplace
from torch import fx

from vllm_layers_bridge.fusions.children import linears_above, only_input
from vllm_layers_bridge.layers.activation import FUSED_ACTIVATIONS

_FUSED = ", ".join(sorted(FUSED_ACTIVATIONS))


@dataclass(frozen=True, slots=True)
class _Factor:
    """One factor of a product: the linear that it comes from, and what was done to its output, outermost first."""

    linear: fx.Node
    steps: tuple[fx.Node, ...]

    @property
    def name(self) -> str:
        return str(self.linear.target)


def explain(miss: Miss, trace: Trace) -> Miss:
    """The miss with the sentence for the first product of two linears; as it was where there is none."""
    for node in trace.graph.nodes:
        if canonical(node) == "mul" and len(node.all_input_nodes) == 2:
            factors = [_factor(operand, trace) for operand in node.all_input_nodes]
            found = _reason(node, factors[0], factors[1], trace) if factors[0] and factors[1] else None
            if found is not None:
                return Miss(found[1], found[0], miss.captures, miss.nodes, miss.subject)
    return miss


def is_product_of_two(node: fx.Node, trace: Trace) -> bool:
    """Whether each factor comes from one linear, and from nothing else that is computed."""
    if canonical(node) != "mul" or len(node.all_input_nodes) != 2:
        return False
    left, right = (_factor(operand, trace) for operand in node.all_input_nodes)
    if left is None or right is None or left.linear is right.linear:
        return False
    steps = (*left.steps, *right.steps)
    return all(len([given for given in step.all_input_nodes if given.op != "get_attr"]) == 1 for step in steps)


def _factor(operand: fx.Node, trace: Trace) -> _Factor | None:
    linears = linears_above(operand, trace)
    if len(linears) != 1:
        return None
    steps: list[fx.Node] = []
    node: Any = operand
    while node is not linears[0]:
        steps.append(node)
        onward = [given for given in node.all_input_nodes if linears[0] in linears_above(given, trace)]
        if not onward:
            return None
        node = onward[0]
    return _Factor(linears[0], tuple(steps))


def _reason(product: fx.Node, left: _Factor, right: _Factor, trace: Trace) -> tuple[fx.Node, str] | None:
    """The node to look at and the sentence; None where nothing stands in the way but what the pattern itself said."""
    if left.linear is right.linear:
        return product, f"both factors come from the one call of `{left.name}`; gate and up are two linears"
    if left.name == right.name:
        return product, f"both factors come from calls of `{left.name}`; gate and up are two linears"
    named = {factor.name: [activation(step, trace) for step in factor.steps] for factor in (left, right)}
    activated = [factor for factor in (left, right) if any(named[factor.name])]
    if not activated:
        return _without_activation(product, left, right, trace)
    gate = next((f for f in activated if f.steps and named[f.name][-1] is not None), activated[0])
    up = right if gate is left else left
    kinds = named[gate.name]
    given = only_input(gate.linear), only_input(up.linear)
    if given[0] is not given[1]:
        for node in given:
            if isinstance(node, fx.Node) and is_inplace(node):
                return (
                    node,
                    f"{_described(node)} writes in place to the input of `{gate.name}` or `{up.name}` before both are computed",
                )
        return up.linear, f"`{gate.name}` and `{up.name}` read different inputs, so they cannot share one weight"
    if kinds[-1] is None:
        step = gate.steps[-1]
        return (
            step,
            f"{_described(step)} stands between `{gate.name}` and its activation; the fused layer has nothing there",
        )
    if len(gate.steps) > 1:
        step = gate.steps[-2]
        return (
            step,
            f"{_described(step)} stands between the activation and the product; the fused layer has nothing there",
        )
    if kinds[0] not in FUSED_ACTIVATIONS:
        return gate.steps[0], f"the activation is {kinds[0]}; vLLM's fused layers have {_FUSED}"
    if up.steps:
        step = up.steps[-1]
        return (
            step,
            f"{_described(step)} stands between `{up.name}` and the product; the fused layer multiplies its output itself",
        )
    return _use(product, gate, up, trace)


def _without_activation(product: fx.Node, left: _Factor, right: _Factor, trace: Trace) -> tuple[fx.Node, str]:
    late = next((user for user in product.users if activation(user, trace)), None)
    if late is not None:
        return late, f"the activation comes after the product of `{left.name}` and `{right.name}`, not before it"
    steps = [*left.steps, *right.steps]
    if steps:
        reason = f"{_described(steps[0])} is no activation that is known; vLLM's fused layers have {_FUSED}"
        return steps[0], reason
    return product, f"neither `{left.name}` nor `{right.name}` is activated before the product"


def _use(product: fx.Node, gate: _Factor, up: _Factor, trace: Trace) -> tuple[fx.Node, str] | None:
    """What else the forward does with a value inside the product."""
    inside = {product, gate.steps[0], gate.linear, up.linear}
    for node in (gate.linear, up.linear, gate.steps[0]):
        other = next((user for user in node.users if user not in inside), None)
        if other is not None:
            return other, f"the output of {_described(node)} is used outside of the product too, by {_described(other)}"
    for node in (only_input(gate.linear), *inside):
        if isinstance(node, fx.Node) and (writers := trace.written_by(node)):
            what = "the input" if node is only_input(gate.linear) else _described(node)
            return writers[0], f"{what} is written to in place by {_described(writers[0])}"
    return None


def _described(node: fx.Node) -> str:
    return f"`{node.target}`" if node.op == "call_module" else f"`{canonical(node)}`"
