"""When several expressions may be computed together, before the first of them.

query = self.q_proj(hidden_states)        q, k = self.qk_proj(hidden_states).split(self.qk_sizes, dim=-1)
key = self.k_proj(hidden_states)     ->   query = q
                                          key = k
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import pairwise

from ast_rewrite._errors import Refused
from ast_rewrite._flow import Flow, simple_path
from ast_rewrite._names import paths_read, read_names
from ast_rewrite._order import runs_conditionally
from ast_rewrite._render import CurrentTree
from ast_rewrite._source import FunctionSource
from ast_rewrite._writes import Pure

_FRAMES = {"exec", "eval", "locals", "vars", "dir"}
_EXITS = (ast.Return, ast.Break, ast.Continue)
_BINDING = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


def require_hoistable(
    source: FunctionSource,
    current: CurrentTree,
    targets: Sequence[ast.expr],
    inputs: Sequence[ast.expr],
    pure: Pure | None,
) -> ast.stmt:
    """The original statement before which the expressions `targets` may be computed from `inputs`.

    Raises Refused with the reason and the place if that cannot be proved.
    """
    if frames := sorted(_FRAMES & read_names(current.tree)):
        raise Refused(f"the function calls {frames[0]}(), which can see or change its variables")
    locate = Flow(source, current, pure)
    spans = [locate.now(target) for target in targets]
    flow = Flow(source, current, pure, fresh=spans)
    for span in spans:
        for node in ast.walk(span):
            if isinstance(node, _BINDING):
                raise Refused("an expression to be hoisted binds a name or suspends the function", flow.span(node))
    block, statements = _shared_block(flow, spans)
    first = min(statements, key=lambda statement: block.index(statement))
    for span, statement in zip(spans, statements, strict=True):
        _require_always_evaluated(flow, span, statement)
        region = flow.region(None, span, start=first)
        if statement is not first:
            _require_no_way_out(flow, block[block.index(first) : block.index(statement)])
        for given in inputs:
            flow.require_unchanged(simple_path(given), region)
        for path in dict.fromkeys(paths_read(span)):
            known = path[0] == source.receiver or path[0] not in _locals(source)
            flow.require_unchanged(path, region, memory=not known)
    original = current.origins.get(first)
    assert isinstance(original, ast.stmt)
    return original


def _shared_block(flow: Flow, spans: Sequence[ast.AST]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The list of statements that holds all spans, and the statement of each."""
    block: list[ast.stmt] | None = None
    statements: list[ast.stmt] = []
    for span in spans:
        chain = flow.chain(span)
        statement = next(node for node in reversed(chain) if isinstance(node, ast.stmt))
        parent = flow.parents[statement]
        mine = next(v for _, v in ast.iter_fields(parent) if isinstance(v, list) and statement in v)
        if block is not None and mine is not block:
            raise Refused("the expressions do not lie in one block, so one can run without the other", flow.span(span))
        for node in chain[1:]:
            if isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
                raise Refused("the expressions lie in a try, whose handlers see how far it came", flow.span(span))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
                raise Refused("the expressions lie in a nested function or class", flow.span(span))
        block = mine
        statements.append(statement)
    assert block is not None
    return block, statements


def _require_always_evaluated(flow: Flow, span: ast.AST, statement: ast.stmt) -> None:
    """Raises Refused unless the statement evaluates the expression each time, once, before anything else of it can matter."""
    chain = flow.chain(span)
    below = chain[chain.index(statement) :]
    for parent, child in pairwise(below):
        late_context = isinstance(parent, ast.With | ast.AsyncWith) and child is not parent.items[0]
        if late_context or isinstance(parent, ast.While) or runs_conditionally(parent, child):
            raise Refused("an expression to be hoisted is not evaluated each time its statement runs", flow.span(span))


def _require_no_way_out(flow: Flow, statements: Sequence[ast.stmt]) -> None:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, _EXITS):
                raise Refused("the function or loop can be left between the expressions", flow.span(node))


def _locals(source: FunctionSource) -> set[str]:
    code = source.function.__code__
    return {*code.co_varnames, *code.co_cellvars}
