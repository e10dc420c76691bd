"""When a statement may go."""

from __future__ import annotations

import ast

from ast_rewrite._errors import Refused
from ast_rewrite._names import bound_by, declared_outside
from ast_rewrite._order import LOOPS, evaluated
from ast_rewrite._render import Rendering
from ast_rewrite._source import FunctionSource
from ast_rewrite._span import SourceSpan

_EFFECTS = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom)
_JUMPS = (ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await)


def require_no_other_effect(source: FunctionSource, statement: ast.stmt, span: SourceSpan) -> None:
    """Raises Refused unless all that a statement does, besides binding names, is the call at `span`."""
    is_whole = isinstance(statement, ast.AugAssign) and span.contains(SourceSpan.of(statement))
    if not is_whole and not isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign):
        raise Refused(
            f"a {type(statement).__name__} statement cannot be deleted; expected an expression or an assignment to names",
            SourceSpan.of(statement),
        )
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AnnAssign | ast.AugAssign) else targets
    for target in targets:
        for node in ast.walk(target):
            if isinstance(node, ast.Attribute | ast.Subscript):
                raise Refused("the statement stores into an object, which others can see", SourceSpan.of(node))
    for node in ast.walk(statement):
        if isinstance(node, _EFFECTS) and not span.contains(SourceSpan.of(node)):
            raise Refused(
                f"{ast.unparse(node)} lies outside of the span and may have an effect of its own", SourceSpan.of(node)
            )


def require_unread(rendering: Rendering) -> None:
    """Raises Refused if the value that a deleted statement bound may still be read after it, edits included."""
    deleted = [p.node for p in rendering.placed if p.edit.kind == "delete"]
    if not deleted:
        return
    current = rendering.current(with_deleted=True)
    gone = [current.copies[node] for node in deleted]
    dead = {child for node in gone for child in ast.walk(node)}
    parents = {child: parent for parent in ast.walk(current.tree) for child in ast.iter_child_nodes(parent)}
    order = {node: at for at, node in enumerate(node for s in current.tree.body for node in evaluated(s))}
    outside = declared_outside(current.tree)
    for original, statement in zip(deleted, gone, strict=True):
        if isinstance(statement, ast.AugAssign):
            continue  # its name is bound before it, and keeps that value
        for name in sorted({name for node in evaluated(statement) for name in bound_by(node)}):
            if name in outside:
                raise Refused(f"{name} is global or nonlocal, and others may read it", SourceSpan.of(original))
            if _bound_anew(statement, name, parents, set(gone)):
                continue
            loops = [loop for loop in _ancestors(statement, parents) if isinstance(loop, LOOPS)]
            repeated = {node for loop in loops for node in ast.walk(loop)}
            for node in ast.walk(current.tree):
                if not _reads(node, name) or node in dead:
                    continue
                if node in order and order[node] < order[statement] and node not in repeated:
                    continue
                origin = current.origins.get(node)
                span = SourceSpan.of(origin) if isinstance(origin, ast.expr) else None
                raise Refused(f"{name}, which the deleted statement binds, is still read after it", span)


def _bound_anew(statement: ast.AST, name: str, parents: dict[ast.AST, ast.AST], gone: set[ast.AST]) -> bool:
    """True if a later statement of the same block binds the name before anything can read it."""
    if any(isinstance(node, ast.Try) or type(node).__name__ == "TryStar" for node in _ancestors(statement, parents)):
        return False
    block = next(
        value for _, value in ast.iter_fields(parents[statement]) if isinstance(value, list) and statement in value
    )
    for later in block[block.index(statement) + 1 :]:
        if later in gone:
            continue
        if any(_reads(node, name) or isinstance(node, _JUMPS) for node in ast.walk(later)):
            return False
        if isinstance(later, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in later.targets):
            return not _captured(name, parents)
    return False


def _captured(name: str, parents: dict[ast.AST, ast.AST]) -> bool:
    """True if a nested function or a lambda reads the name, at a time that is not known."""
    scopes = [node for node in parents if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    return any(_reads(node, name) for scope in scopes for node in ast.walk(scope))


def _reads(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.AugAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    return isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Store)


def _ancestors(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> list[ast.AST]:
    found = []
    while node in parents:
        node = parents[node]
        found.append(node)
    return found
