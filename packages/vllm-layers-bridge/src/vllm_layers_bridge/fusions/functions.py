"""Calls of a model's own functions in a forward, as text and as nodes.

In: a trace. Out: for each call, by name, of a Python function that the forward finds in its module: where it stands, the function, and
the nodes that it made. With the function as a leaf of the same trace, what the call was given is known exactly.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ast_rewrite import FunctionSource, Patch, Refused, SourceSpan
from fx_match import Trace
from torch import fx


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call at `span` of the forward's text; `nodes` is what it computed, in a trace in which the function is no leaf."""

    span: SourceSpan
    function: types.FunctionType
    nodes: tuple[fx.Node, ...]

    def leaf(self, trace: Trace) -> fx.Node | None:
        """The one node of this call in a trace in which the function is a leaf; None if there are several, or none."""
        made = [node for node in trace.graph.nodes if node.target is self.function and _span(trace, node) == self.span]
        return made[0] if len(made) == 1 and trace.location(made[0]).helper_span is None else None


def called_functions(trace: Trace, among: Collection[fx.Node]) -> tuple[FunctionCall, ...]:
    """The calls that made any of the nodes `among`, in the order of the graph; RewriteError where the forward has no source."""
    source = FunctionSource.of(trace.module_class.forward)
    found: dict[SourceSpan, FunctionCall] = {}
    for node in trace.graph.nodes:
        span = _span(trace, node)
        if node not in among or span is None or span in found or trace.location(node).helper_span is None:
            continue
        function = _function(source, span)
        if function is not None:
            nodes = tuple(other for other in trace.graph.nodes if _span(trace, other) == span)
            found[span] = FunctionCall(span, function, nodes)
    return tuple(found.values())


def written_arguments(patch: Patch, called: FunctionCall, wanted: Collection[str]) -> Mapping[str, ast.expr]:
    """By parameter, the expressions of the call for `wanted`; Refused unless all else in it is constants."""
    expression = patch.source.expression_at(called.span)
    if not isinstance(expression, ast.Call):
        raise Refused("there is no call where one was traced", called.span)
    code = called.function.__code__
    names = code.co_varnames[: code.co_argcount]
    if any(isinstance(given, ast.Starred) for given in expression.args) or len(expression.args) > len(names):
        raise Refused("the call does not spell its arguments", called.span)
    written = dict(zip(names, expression.args, strict=False))
    for keyword in expression.keywords:
        if keyword.arg is None:
            raise Refused("the call does not spell its arguments", called.span)
        written[keyword.arg] = keyword.value
    if missing := [name for name in wanted if name not in written]:
        raise Refused(f"the call does not spell `{missing[0]}`", called.span)
    for name, given in written.items():
        if name not in wanted and not isinstance(given, ast.Constant):
            raise Refused(f"`{ast.unparse(given)}`, which the call is given too, would not be computed", called.span)
    return {name: written[name] for name in wanted}


def _function(source: FunctionSource, span: SourceSpan) -> types.FunctionType | None:
    try:
        expression = source.expression_at(span)
    except Refused:
        return None
    if not isinstance(expression, ast.Call) or not isinstance(expression.func, ast.Name):
        return None
    name, code = expression.func.id, source.function.__code__
    if name in {*code.co_varnames, *code.co_cellvars, *code.co_freevars}:
        return None
    function = source.function.__globals__.get(name)
    return function if type(function) is types.FunctionType else None


def _span(trace: Trace, node: fx.Node) -> SourceSpan | None:
    span = trace.span(node)
    return None if span is None else SourceSpan(span.lineno, span.col, span.end_lineno, span.end_col)
