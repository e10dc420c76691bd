"""An expression that is computed over several statements, put into one.

    gate, up_states = up_states.chunk(2, dim=-1)            gated_output = self.act_and_mul(up_states)
    up_states = up_states * self.activation_fn(gate)   ->   up_states = gated_output

In: a trace, a patch, the nodes of a match. What the nodes computed is computed once, before the first statement that takes part; the last
expression becomes its name, and the statements in between, which nothing reads any more, go; with them those that only hand a part of their
result on (``parts = x.chunk(2, -1)``, then ``gate = parts[0]``). Only where all instances run the traced
path, since what stands on another one is not in the graph. Raises `ast_rewrite.Refused`.
"""

from __future__ import annotations

import ast
from collections.abc import Collection

from ast_rewrite import Patch, Refused, SourceSpan
from fx_match import Trace
from torch import fx

from vllm_layers_bridge.fusions.source import is_path_known, pure_calls, require_nothing_lost, source_span


def gather(
    trace: Trace, patch: Patch, root: fx.Node, nodes: Collection[fx.Node], template: str, name: str, given: SourceSpan
) -> None:
    """Replace what `nodes` compute, whose result is `root`.

    Args:
        nodes: those whose statements go; they are used by nothing but each other and `root`.
        template: text of the expression that computes `root`; ``{0}`` is the text at `given`.
        name: wanted for the result.
        given: a name, or attributes of one, in the first of the statements.

    Raises:
        Refused: the path is not the same for all instances; a statement does more than the nodes, or what it binds is read elsewhere.
    """
    if not is_path_known(trace):
        raise Refused("its statements may take another path than the one that was traced")
    last = source_span(trace, root)
    spans = sorted(_outermost({source_span(trace, node) for node in nodes if trace.span(node) is not None}))
    first = next((span for span in spans if not last.contains(span)), None)
    if first is None:
        raise Refused("all of it is one expression", last)
    for span in (last, *spans):
        require_nothing_lost(trace, patch, span, given)
    (made,) = patch.hoist([first], template, (name,), [given], pure=pure_calls(trace))
    patch.replace(last, made, dropping=spans)
    gone = [span for span in spans if not last.contains(span)]
    for span in sorted((*gone, *_handing_on(patch, gone, last)), reverse=True):
        patch.delete(span)


def _handing_on(patch: Patch, gone: Collection[SourceSpan], last: SourceSpan) -> list[SourceSpan]:
    """Values of statements up to `last` that only name, or name an item of, what a statement at `gone` or another of them has bound."""
    statements = [patch.source.statement_at(span) for span in gone]
    names = {name for statement in statements for name in _bound(statement)}
    found: list[SourceSpan] = []
    for node in _in_order(patch.source.tree):
        if not isinstance(node, ast.Assign) or node in statements or SourceSpan.of(node).contains(last):
            continue
        value: ast.expr = node.value
        while isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant | ast.UnaryOp):
            value = value.value
        if (
            isinstance(value, ast.Name)
            and value.id in names
            and min(gone) < SourceSpan.of(node) < last
            and _bound(node)
        ):
            names |= _bound(node)
            found.append(SourceSpan.of(node.value))
    return found


def _in_order(tree: ast.AST) -> list[ast.stmt]:
    return sorted(
        (node for node in ast.walk(tree) if isinstance(node, ast.stmt)), key=lambda node: (node.lineno, node.col_offset)
    )


def _bound(statement: ast.stmt) -> set[str]:
    """Names that an assignment binds; none if it stores into an object."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    inside = [node for target in targets for node in ast.walk(target)]
    if any(isinstance(node, ast.Attribute | ast.Subscript) for node in inside):
        return set()
    return {node.id for node in inside if isinstance(node, ast.Name)}


def _outermost(spans: set[SourceSpan]) -> set[SourceSpan]:
    return {span for span in spans if not any(other != span and other.contains(span) for other in spans)}
