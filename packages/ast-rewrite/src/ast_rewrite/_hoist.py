"""When several expressions may be computed together, before the first of them.

query = self.q_proj(hidden_states)        q, k = self.qk_proj(hidden_states).split(self.qk_sizes, dim=-1)
key = self.k_proj(hidden_states)     ->   query = q
                                          key = k
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

from ast_rewrite._errors import Refused
from ast_rewrite._flow import Flow, simple_path
from ast_rewrite._names import paths_read, read_names
from ast_rewrite._order import runs_conditionally
from ast_rewrite._render import CurrentTree
from ast_rewrite._source import FunctionSource
from ast_rewrite._writes import Pure

Decided: TypeAlias = Callable[[ast.expr], bool]
"""Tells of the test of an ``if``, as it stands in the original, that it always comes out so that the expressions are evaluated."""

_FRAMES = {"exec", "eval", "locals", "vars", "dir"}
_EXITS = (ast.Return, ast.Break, ast.Continue)
_BINDING = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


def require_hoistable(
    source: FunctionSource,
    current: CurrentTree,
    targets: Sequence[ast.expr],
    inputs: Sequence[ast.expr],
    pure: Pure | None,
    decided: Decided | None = None,
    named: Sequence[ast.expr] = (),
) -> ast.stmt:
    """The original statement before which the expressions `targets` may be computed from `inputs`.

    `named`: paths in the targets by which they read an input under another name; what is asked of them is asked of the input.

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
    is_decided = _on_current(flow, decided)
    block, statements = _shared_block(flow, spans, is_decided)
    other_names = {simple_path(node) for node in named}
    first = min(statements, key=lambda statement: block.index(statement))
    for span, statement in zip(spans, statements, strict=True):
        _require_always_evaluated(flow, span, statement, is_decided)
        region = flow.region(None, span, start=first)
        _require_no_way_out(flow, block[block.index(first) : block.index(statement)])
        _require_no_way_out(flow, _before_within(flow, span, statement))
        for given in inputs:
            flow.require_unchanged(simple_path(given), region)
        for path in dict.fromkeys(paths_read(span)):
            if path in other_names:
                continue
            known = path[0] == source.receiver or path[0] not in _locals(source)
            flow.require_unchanged(path, region, memory=not known)
    original = current.origins.get(first)
    assert isinstance(original, ast.stmt)
    return original


def _on_current(flow: Flow, decided: Decided | None) -> Decided:
    """The same question about a test of the current tree; one that an edit made or took away is not decided."""

    def is_decided(test: ast.expr) -> bool:
        origin = flow.current.origins.get(test)
        return decided is not None and isinstance(origin, ast.expr) and decided(origin)

    return is_decided


def _shared_block(flow: Flow, spans: Sequence[ast.AST], is_decided: Decided) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The innermost list of statements that holds all spans, and the statement of each."""
    found: list[list[tuple[list[ast.stmt], ast.stmt]]] = []
    for span in spans:
        for node in flow.chain(span)[1:]:
            if isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
                raise Refused("the expressions lie in a try, whose handlers see how far it came", flow.span(span))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
                raise Refused("the expressions lie in a nested function or class", flow.span(span))
        found.append(list(_blocks(flow, span, is_decided)))
    for block, _ in found[0]:
        statements = [next((mine for other, mine in places if other is block), None) for places in found]
        known = [statement for statement in statements if statement is not None]
        if len(known) == len(spans):
            return block, known
    apart = next((span for span, places in zip(spans, found, strict=True) if places[0][0] is not found[0][0][0]), None)
    assert apart is not None
    raise Refused("the expressions do not lie in one block, so one can run without the other", flow.span(apart))


def _blocks(flow: Flow, span: ast.AST, is_decided: Decided) -> Iterator[tuple[list[ast.stmt], ast.stmt]]:
    """Lists of statements that hold the span, from the inside out, each with the statement; no further than every run of one runs it."""
    for statement in reversed(flow.chain(span)):
        if not isinstance(statement, ast.stmt):
            continue
        parent = flow.parents.get(statement)
        if parent is None:
            return
        yield next(v for _, v in ast.iter_fields(parent) if isinstance(v, list) and statement in v), statement
        if not isinstance(parent, ast.If) or not is_decided(parent.test):
            return


def _before_within(flow: Flow, span: ast.AST, statement: ast.stmt) -> list[ast.stmt]:
    """Statements within `statement`, in the branches that lead to the span, which run before it."""
    chain = flow.chain(span)
    before: list[ast.stmt] = []
    for parent, child in pairwise(chain[chain.index(statement) :]):
        lists = (v for _, v in ast.iter_fields(parent) if isinstance(v, list) and child in v)
        for block in lists:
            before += [node for node in block[: block.index(child)] if isinstance(node, ast.stmt)]
    return before


def _require_always_evaluated(flow: Flow, span: ast.AST, statement: ast.stmt, is_decided: Decided) -> None:
    """Raises Refused unless the statement evaluates the expression each time, once, before anything else of it can matter."""
    chain = flow.chain(span)
    below = chain[chain.index(statement) :]
    for parent, child in pairwise(below):
        if isinstance(parent, ast.If | ast.IfExp) and child is not parent.test and is_decided(parent.test):
            continue
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
