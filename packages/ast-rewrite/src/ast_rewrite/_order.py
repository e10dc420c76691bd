"""The order in which a function evaluates its nodes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LOOPS = (ast.For, ast.AsyncFor, ast.While)

SHARED = (ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop)  # the parser uses one object for all

_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Assign: ("value", "targets"),
    ast.AnnAssign: ("value", "target"),
    ast.For: ("iter", "target", "body", "orelse"),
    ast.AsyncFor: ("iter", "target", "body", "orelse"),
    ast.IfExp: ("test", "body", "orelse"),
    ast.NamedExpr: ("value", "target"),
    ast.ListComp: ("generators", "elt"),
    ast.SetComp: ("generators", "elt"),
    ast.GeneratorExp: ("generators", "elt"),
    ast.DictComp: ("generators", "key", "value"),
    ast.comprehension: ("iter", "target", "ifs"),
    ast.FunctionDef: ("decorator_list", "args"),
    ast.AsyncFunctionDef: ("decorator_list", "args"),
    ast.Lambda: ("args",),
    ast.arguments: ("defaults", "kw_defaults"),
    ast.ClassDef: ("decorator_list", "bases", "keywords", "body"),
}


def evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes under `node` and itself, in the order in which their evaluation ends.

    Both branches of a condition are given, one after the other; a loop body is given once; the bodies of nested functions
    and lambdas, which run at another time, are left out, what runs when they are made is not.
    """
    if isinstance(node, SHARED):
        return
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                yield from evaluated(key)
            yield from evaluated(value)
    elif isinstance(node, ast.AugAssign):  # a name is bound, and an object written to, after the value is there
        for child in ast.iter_child_nodes(node.target):
            yield from evaluated(child)
        yield from evaluated(node.value)
        yield node.target
    elif isinstance(node, ast.ExceptHandler):  # its name is bound before its body runs
        if node.type is not None:
            yield from evaluated(node.type)
        yield node
        for statement in node.body:
            yield from evaluated(statement)
        return
    else:
        for name in _FIELDS.get(type(node), node._fields):
            content: Any = getattr(node, name, None)
            for part in content if isinstance(content, list) else [content]:
                if isinstance(part, ast.AST):
                    yield from evaluated(part)
    yield node


def runs_conditionally(parent: ast.AST, child: ast.AST) -> bool:
    """True if `parent` can be evaluated without `child`."""
    if isinstance(parent, ast.If | ast.IfExp | ast.While):
        return child is not parent.test
    if isinstance(parent, ast.BoolOp):
        return child is not parent.values[0]
    if isinstance(parent, ast.Compare):
        return child is not parent.left and child is not parent.comparators[0]
    if isinstance(parent, ast.For | ast.AsyncFor):
        return child is not parent.iter
    if isinstance(parent, ast.Match):
        return child is not parent.subject
    if isinstance(parent, SCOPES):
        return not (isinstance(child, ast.expr) and child in getattr(parent, "decorator_list", ()))
    return isinstance(parent, (ast.Try, ast.Assert, *COMPREHENSIONS)) or type(parent).__name__ == "TryStar"
