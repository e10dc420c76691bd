"""Names of a function: what it binds, what it reads, which are free for new variables."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator

from ast_rewrite._files import FunctionNode

Path = tuple[str, ...]  # ("self", "config", "eps") for self.config.eps


def bound_by(node: ast.AST) -> Iterator[str]:
    """Names that this one node binds, unbinds or declares, not counting the nodes under it."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.alias):
        yield node.asname or node.name.partition(".")[0]
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest
    elif isinstance(node, ast.arg):
        yield node.arg


def bound_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Names bound anywhere under these nodes, nested functions and comprehensions included."""
    return {name for node in nodes for child in ast.walk(node) for name in bound_by(child)}


def read_names(node: ast.AST) -> set[str]:
    """Names read anywhere under a node."""
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load)}


def declared_outside(function: ast.AST) -> set[str]:
    """Names that a ``global`` or ``nonlocal`` statement names, here or in a nested function."""
    return {name for node in ast.walk(function) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}


def parameters(function: FunctionNode) -> list[str]:
    """Names of the parameters in order, ``*args`` and ``**kwargs`` last."""
    args = function.args
    plain = [argument.arg for argument in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return plain + [argument.arg for argument in (args.vararg, args.kwarg) if argument is not None]


def path_of(node: ast.AST) -> Path | None:
    """The path of a name or of attributes of one; None for anything else."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (base := path_of(node.value)) is not None:
        return (*base, node.attr)
    return None


def paths_read(node: ast.AST) -> Iterator[Path]:
    """The longest paths that an expression reads."""
    path = path_of(node)
    if path is not None:
        yield path
        return
    for child in ast.iter_child_nodes(node):
        yield from paths_read(child)


def unused_name(wanted: str, taken: Iterable[str]) -> str:
    """`wanted`, with a number behind it if that name is taken or is a builtin."""
    known = {*taken, *dir(builtins)}
    name, number = wanted, 1
    while name in known:
        number += 1
        name = f"{wanted}_{number}"
    return name
