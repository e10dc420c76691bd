"""An expression that is computed over several statements, put into one.

    gate, up_states = up_states.chunk(2, dim=-1)            gated_output = self.act_and_mul(up_states)
    up_states = up_states * self.activation_fn(gate)   ->   up_states = gated_output

In: a trace, a patch, the nodes of a match. What the nodes computed is computed once, before the first statement that takes part; the last
expression becomes its name, and the statements in between, which nothing reads any more, go. Only where all instances run the traced
path, since what stands on another one is not in the graph. Raises `ast_rewrite.Refused`.
"""

from __future__ import annotations

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
    for span in reversed(spans):
        if not last.contains(span):
            patch.delete(span)


def _outermost(spans: set[SourceSpan]) -> set[SourceSpan]:
    return {span for span in spans if not any(other != span and other.contains(span) for other in spans)}
