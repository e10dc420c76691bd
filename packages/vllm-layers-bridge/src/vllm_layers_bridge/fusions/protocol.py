"""What a fusion is: find it in a trace, check an instance, rewrite the source, name the layers.

A fusion either rewrites the forward of the module that it matched, or takes the place of the whole module (`replaces_module`).
Finding and rewriting happen once per variant of a class; checking and naming layers happen for each instance, since instances of one
variant share code and not sizes.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ast_rewrite import Patch, SourceSpan
from fx_match import Match, Miss, Trace
from torch import fx, nn

from vllm_layers_bridge.specs import AttentionSpec, LayerSpec


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """What is known of one instance beyond its own tensors."""

    name: str
    attention: tuple[AttentionSpec, ...] = ()
    """Calls of the attention interface that this module makes, in order."""


@runtime_checkable
class Fusion(Protocol):
    """One fusion; see the modules of `vllm_layers_bridge.fusions` for what one looks like."""

    name: str
    replaces_module: bool

    def is_candidate(self, trace: Trace) -> bool:
        """Whether a miss on this module would be worth telling: it has the parts, if not the shape."""
        ...

    def match(self, trace: Trace) -> Match | Miss:
        """Find the fusion in the trace of a forward."""
        ...

    def check(self, match: Match, module: nn.Module, facts: ModuleFacts) -> None:
        """Raise `NotFusable` where fusing this instance would not be right."""
        ...

    def rewrite(self, match: Match, trace: Trace, patch: Patch) -> None:
        """Edit the forward; raises `ast_rewrite.Refused` where the edit cannot be proved safe."""
        ...

    def layers(self, match: Match, module: nn.Module, facts: ModuleFacts) -> tuple[LayerSpec, ...]:
        """The layers that the instance gets."""
        ...


def source_span(trace: Trace, node: fx.Node) -> SourceSpan:
    """The span of `node` in the forward, as `ast_rewrite` takes it; LookupError when it has none."""
    span = trace.span(node)
    if span is None:
        raise LookupError(f"`{node.name}` was made by no expression of the forward itself")
    return SourceSpan(span.lineno, span.col, span.end_lineno, span.end_col)


def argument_span(patch: Patch, call: SourceSpan) -> SourceSpan:
    """The span of the one argument of the call at `call`; LookupError when it is not a call of one argument."""
    expression = patch.source.expression_at(call)
    if not isinstance(expression, ast.Call):
        raise LookupError(f"line {call.lineno} has no call where one was traced")
    arguments = [*expression.args, *(keyword.value for keyword in expression.keywords)]
    if len(arguments) != 1 or isinstance(arguments[0], ast.Starred):
        raise LookupError(f"the call at line {call.lineno} has {len(arguments)} arguments, expected one")
    only = arguments[0]
    if only.end_lineno is None or only.end_col_offset is None:
        raise LookupError(f"the argument at line {call.lineno} has no position")
    return SourceSpan(only.lineno, only.col_offset, only.end_lineno, only.end_col_offset)


def is_plain_linear(module: object) -> bool:
    """Whether a child is an `nn.Linear` and no subclass, whose forward might do more."""
    return type(module) is nn.Linear
