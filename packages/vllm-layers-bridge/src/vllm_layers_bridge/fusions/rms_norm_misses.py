"""Why a norm is no root-mean-square norm that vLLM has, in a sentence about what its forward computes.

In: the miss of the pattern, or a match that does more than the pattern shows. Out: the node to look at and the reason.
"""

from __future__ import annotations

import torch
from fx_match import Match, Miss, Trace, canonical, cast_dtype, is_inplace
from torch import fx

from vllm_layers_bridge.fusions.source import is_path_known

_WIDE = (torch.float32, torch.float64)


def explain(miss: Miss, trace: Trace, core: Match | Miss) -> Miss:
    """The miss with a sentence for the commonest other norms; for the rest, where it parts from the formula.

    core: the norm without its weight, if it is there; then it is what else the forward computes that stands in the way.
    """
    node, reason = _reason(miss, trace, core) or (
        miss.node,
        f"it is not x / sqrt(mean(x^2) + eps) * weight: {miss.reason}",
    )
    return Miss(reason, node, miss.captures, miss.nodes, miss.subject)


def unfit(match: Match, trace: Trace) -> tuple[fx.Node, str] | None:
    """What a forward that has the right shape computes otherwise than vLLM's layer would; None if nothing."""
    inputs = [node for node in trace.graph.nodes if node.op == "placeholder"]
    if match["input"] not in inputs:
        return match.root, "what is normalised is not the module's input"
    if len(inputs) != 1:
        return match.root, f"it is given {len(inputs)} tensors; vLLM's layer would add the second to its input"
    for name in ("eps", "offset"):
        if isinstance(match.get(name), fx.Node):
            return match[name], f"its {name} is a tensor; vLLM's layer takes a number"
    if trace.changes:
        return match.root, f"its forward sets `{min(trace.changes)}`, which would be lost with it"
    if not is_path_known(trace):
        return match.root, "its forward asks for a size of its input, and may do something else for another one"
    given, returned = trace.value(match["input"]), trace.value(match.root)
    if not isinstance(given, torch.Tensor) or not isinstance(returned, torch.Tensor) or not given.is_floating_point():
        return match.root, "the type of its input is not known"
    if returned.dtype != given.dtype:
        return (
            match.root,
            f"it returns {returned.dtype} for an input of {given.dtype}; vLLM's layer returns the input's type",
        )
    shape = match.get("shape", (given.shape[-1],))
    if tuple(shape) != (given.shape[-1],):
        return match.root, f"it normalises over {tuple(shape)}; vLLM's layer takes the last axis alone"
    for node in match.nodes:
        if canonical(node) == "cast" and (dtype := cast_dtype(node)) not in (*_WIDE, given.dtype):
            return node, f"it casts to {dtype} on the way, which loses digits that vLLM's layer keeps"
        if is_inplace(node):
            return node, "it works in place"
    return None


_IDLE = ("placeholder", "get_attr", "output")


def _reason(miss: Miss, trace: Trace, core: Match | Miss) -> tuple[fx.Node | None, str] | None:
    by_name: dict[str, list[fx.Node]] = {}
    for node in trace.graph.nodes:
        by_name.setdefault(canonical(node), []).append(node)
    if trace.stop is not None:
        return miss.node, f"its forward could not be followed: {trace.stop.reason}"
    if "sub" in by_name and "mean" in by_name:
        return by_name["sub"][0], "it subtracts from its input, as a LayerNorm subtracts the mean; an RMS norm does not"
    if "layer_norm" in by_name:
        return by_name["layer_norm"][0], "it is a LayerNorm, which subtracts the mean; an RMS norm does not"
    if "sum" in by_name and "mean" not in by_name:
        return by_name["sum"][
            0
        ], "it divides by the root of a sum of squares; an RMS norm divides by that of their mean"
    if isinstance(trace.output, tuple | list | dict):
        return miss.node, f"it returns {len(trace.output)} values; vLLM's layer returns the normalised tensor alone"
    if isinstance(core, Match):
        for node in trace.graph.nodes:
            if node.op not in _IDLE and node not in core.nodes and not _is_weighting(node):
                return node, f"it computes `{canonical(node)}` beside the norm; vLLM's layer computes the norm alone"
    return None


def _is_weighting(node: fx.Node) -> bool:
    """A product with a parameter, the sum of one and a number, or a cast: what a norm may have around it."""
    name = canonical(node)
    return name == "cast" or (name in ("mul", "add") and any(given.op == "get_attr" for given in node.all_input_nodes))
