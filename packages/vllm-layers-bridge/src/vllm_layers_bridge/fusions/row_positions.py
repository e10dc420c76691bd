"""A count of the tokens in a row stands for their positions: what is computed from it is computed from the engine's positions.

    at = torch.arange(x.shape[1])  ->  at = self.engine_row.positions if hasattr(self, "engine_row") else torch.arange(x.shape[1])

transformers gives a model one sequence from its first token on, so that the number of a token in its row is its position. The engine
gives a row of tokens of many sequences. The count may be computed with, number by number, and meet values of the tokens that it counts;
where it picks, sorts or compares tokens with each other, it is no position.
"""

from __future__ import annotations

import dataclasses

import torch
from ast_rewrite import Patch
from fx_match import CASTS, Match, Miss, Trace, any_value, call, canonical, find, find_all
from torch import fx, nn

from vllm_layers_bridge.fusions.children import require_free_names
from vllm_layers_bridge.fusions.protocol import ModuleFacts
from vllm_layers_bridge.fusions.source import require_same_forward, source_span
from vllm_layers_bridge.seams.row import ROW
from vllm_layers_bridge.specs import LayerSpec

PATTERN = call(torch.arange)(any_value("count"))

_NUMBER_BY_NUMBER = frozenset(
    {
        "add", "sub", "mul", "div", "floor_div", "trunc_div", "remainder", "pow", "floor", "ceil", "trunc", "round", "neg", "abs",
        "exp", "log", "log1p", "log2", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "clamp", "reshape", "unsqueeze", "expand", "to",
        "contiguous", "clone", "detach", *CASTS,
    }
)  # fmt: skip
_JOINS = frozenset({"add", "sub", "mul", "div"})
_SIZES = frozenset({"shape", "size", "numel", "device", "dtype"})


class RowPositions:
    """See the module."""

    name = "row_positions"
    replaces_module = False

    def is_candidate(self, trace: Trace) -> bool:
        """A module that counts the tokens of its input."""
        return any(_counts_tokens(match.root, trace) for match in find_all(PATTERN, trace))

    def match(self, trace: Trace) -> Match | Miss:
        """Every count of the tokens in a row of the input; each must be computed with number by number."""
        found = find(PATTERN, trace)
        if isinstance(found, Miss):
            return found
        counts = tuple(match.root for match in find_all(PATTERN, trace) if _counts_tokens(match.root, trace))
        if not counts:
            return Miss("it does not count the tokens of its input", found.root, {}, (), found.subject)
        for count in counts:
            if (use := _other_use(count, trace)) is not None:
                reason = f"`{canonical(use)}` takes the count of the tokens otherwise than number by number"
                return Miss(reason, use, {}, (), found.subject)
        return dataclasses.replace(found, root=counts[0], captures={"counts": counts}, nodes=counts)

    def check(self, match: Match, module: nn.Module, facts: ModuleFacts) -> None:
        """The name by which the row is reached is free."""
        require_free_names(module, (ROW,))

    def rewrite(self, match: Match, trace: Trace, patch: Patch) -> None:
        """Each count gives way to the positions where there are some."""
        require_same_forward(trace, patch)
        receiver = patch.source.receiver
        for span in dict.fromkeys(source_span(trace, node) for node in match["counts"]):
            row = f'{receiver}.{ROW}.positions if hasattr({receiver}, "{ROW}")'
            patch.replace(span, f"({row} else {{counted}})", counted=span)

    def layers(self, match: Match, module: nn.Module, facts: ModuleFacts) -> tuple[LayerSpec, ...]:
        """None: the row is attached when the plan is applied."""
        return ()


def _counts_tokens(node: fx.Node, trace: Trace) -> bool:
    """Whether the numbers are 0, 1, ... up to the length of the one row of an input [1, tokens, ...]."""
    value = trace.value(node)
    if len(node.args) != 1 or not isinstance(node.args[0], fx.Node) or not node.kwargs.keys() <= {"device"}:
        return False
    if not isinstance(value, torch.Tensor) or value.dtype != torch.int64:
        return False
    inputs = (trace.value(other) for other in trace.graph.nodes if other.op == "placeholder")
    return any(isinstance(i, torch.Tensor) and i.ndim == 3 and i.shape[:2] == (1, *value.shape) for i in inputs)


def _other_use(count: fx.Node, trace: Trace) -> fx.Node | None:
    """The first operation that does more with what comes of `count` than computing with each number for itself."""
    tokens = _entries(count, trace)
    derived = {count}
    node: fx.Node
    for node in trace.graph.nodes:
        if derived.isdisjoint(node.all_input_nodes) or canonical(node) in _SIZES:
            continue
        joined = [other for other in node.all_input_nodes if other not in derived and _entries(other, trace) > 1]
        if joined:
            if canonical(node) not in _JOINS or _entries(node, trace) != max(_entries(o, trace) for o in joined):
                return node
        elif not _is_number_by_number(node) or _entries(node, trace) != tokens:
            return node
        else:
            derived.add(node)
    return None


def _is_number_by_number(node: fx.Node) -> bool:
    if canonical(node) != "getitem":
        return canonical(node) in _NUMBER_BY_NUMBER
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(part is None or part is ... or part == slice(None) for part in index)


def _entries(node: fx.Node, trace: Trace) -> int:
    value = trace.value(node)
    return value.numel() if isinstance(value, torch.Tensor) else 0
