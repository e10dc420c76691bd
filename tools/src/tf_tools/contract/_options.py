"""Options of ``vllm serve``, which our command line hands on and our messages name.

In: a resolver. Out: option names with where each is defined. An option is a field of the engine's or the front end's argument classes, or a
literal that the parser is given. Paths name one as ``vllm-serve:tensor_parallel_size``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tf_tools.contract._classes import lineage, statements
from tf_tools.contract._things import Thing

if TYPE_CHECKING:
    from tf_tools.contract._resolve import Resolver

NAMESPACE = "vllm-serve"

_ENGINE = "vllm.engine.arg_utils:AsyncEngineArgs"
_PARSER = "vllm.entrypoints.cli.serve:make_arg_parser"


def serve_options(resolver: Resolver) -> dict[str, str]:
    """Option, with underscores -> module and qualified name of its definition."""
    found: dict[str, str] = {}
    for path in (_ENGINE, _PARSER):
        for thing in (thing for answer in resolver.resolve(path).found for thing in answer.things):
            if thing.kind == "class":
                found |= _fields(thing, resolver)
            if thing.module is None:
                continue
            for name in thing.module.bindings:
                if name == "FrontendArgs":
                    for answer in resolver.lookup(thing.module, name):
                        found |= _fields(answer.things[0], resolver)
            found |= dict.fromkeys(added_options(thing.module.tree), thing.module.name)
    return found


def _fields(cls: Thing, resolver: Resolver) -> dict[str, str]:
    found = {}
    for one in lineage(cls, resolver):
        if isinstance(one.node, ast.ClassDef):
            for node in statements(one.node.body):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found[node.target.id] = f"{one.where}.{node.target.id}"
    return found


def added_options(tree: ast.AST) -> Iterator[str]:
    """Names, with underscores, that a module gives to ``add_argument`` as literals."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value.lstrip("-").replace("-", "_")
