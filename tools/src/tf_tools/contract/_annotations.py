"""Types in vLLM's source: what an annotation names, and what a simple expression gives.

In: an expression and where it stands. Out: `Thing`s, several for a union; an unknown one with the reason where the source does not say.
"""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tf_tools.contract._things import Found, Function, Thing, instance_of, outside, unknown
from tf_tools.contract._tree import Module

if TYPE_CHECKING:
    from tf_tools.contract._resolve import Resolver

_DEEP = 25
_TRANSPARENT = {
    "Optional",
    "Union",
    "Annotated",
    "ClassVar",
    "Final",
    "Required",
    "NotRequired",
    "Awaitable",
    "SkipValidation",
}
_SEQUENCES = {
    "list",
    "List",
    "tuple",
    "Tuple",
    "set",
    "frozenset",
    "Set",
    "Sequence",
    "Iterable",
    "Iterator",
    "Generator",
}
_SEQUENCES |= {"Collection", "deque", "MutableSequence", "AbstractSet", "ModuleList"}
_MAPPINGS = {"dict", "Dict", "Mapping", "MutableMapping", "OrderedDict", "defaultdict"}


@dataclass(frozen=True, slots=True, eq=False)
class Scope:
    """Where an expression stands: module, function, and the class whose ``self`` it may name."""

    module: Module
    function: Function | None = None
    cls: Thing | None = None
    depth: int = 0

    def deeper(self) -> Scope:
        """One level down; an expression that leads in a circle ends as unknown."""
        return Scope(self.module, self.function, self.cls, self.depth + 1)


def types_of_annotation(node: ast.expr | None, scope: Scope, resolver: Resolver) -> tuple[Thing, ...]:
    """Objects of the types that an annotation names, without None."""
    if node is None:
        return (unknown(f"no annotation in {scope.module.name}"),)
    if scope.depth > _DEEP:
        return (unknown(f"an annotation that refers to itself in {scope.module.name}"),)
    scope = scope.deeper()
    match node:
        case ast.Constant(value=None):
            return ()
        case ast.Constant(value=str(text)):
            return types_of_annotation(ast.parse(text, mode="eval").body, scope, resolver)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return (*types_of_annotation(left, scope, resolver), *types_of_annotation(right, scope, resolver))
        case ast.Subscript(value=value, slice=inner):
            return _generic(ast.unparse(value).rpartition(".")[2], value, inner, scope, resolver)
        case ast.Name(id="Any" | "object"):
            return (unknown(f"annotated {ast.unparse(node)} in {scope.module.name}"),)
        case ast.Name(id="Self") if scope.cls is not None:
            return (instance_of(scope.cls),)
        case ast.Name() | ast.Attribute():
            return _named_type(node, scope, resolver)
    return (unknown(f"the annotation {ast.unparse(node)} in {scope.module.name}"),)


def _generic(name: str, value: ast.expr, inner: ast.expr, scope: Scope, resolver: Resolver) -> tuple[Thing, ...]:
    arguments = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if name in _TRANSPARENT:
        arguments = arguments[:1] if name == "Annotated" else arguments
        return tuple(one for part in arguments for one in types_of_annotation(part, scope, resolver))
    if name in {"type", "Type"}:
        return tuple(
            Thing("class", one.where, one.module, one.node) if one.kind == "instance" else one
            for one in types_of_annotation(arguments[0], scope, resolver)
        )
    if name in _SEQUENCES:
        parts = [part for part in arguments if not (isinstance(part, ast.Constant) and part.value is ...)]
        return (
            Thing("items", name, elements=tuple(o for p in parts for o in types_of_annotation(p, scope, resolver))),
        )
    if name in _MAPPINGS:
        keys, values = (types_of_annotation(part, scope, resolver) for part in arguments)
        return (Thing("mapping", name, elements=values, keys=keys),)
    if name == "Literal":
        return tuple(outside(f"builtins.{type(p.value).__name__}") for p in arguments if isinstance(p, ast.Constant))
    return types_of_annotation(value, scope, resolver)


def _named_type(node: ast.expr, scope: Scope, resolver: Resolver) -> tuple[Thing, ...]:
    types: list[Thing] = []
    for answer in _names(node, scope, resolver, typing=True):
        if answer.kind == "class":
            types += [instance_of(one) for one in answer.things]
        elif answer.kind == "value" and answer.value is not None and _is_alias(answer.value):
            module = resolver.tree.module(answer.where.partition(":")[0])
            assert module is not None
            types += types_of_annotation(answer.value, Scope(module, depth=scope.depth), resolver)
        else:
            types += answer.things
    return tuple(types) or (unknown(f"the type {ast.unparse(node)} in {scope.module.name}"),)


def _is_alias(value: ast.expr) -> bool:
    return isinstance(value, ast.Subscript | ast.BinOp | ast.Name | ast.Attribute)


def type_of_expression(node: ast.expr | None, scope: Scope, resolver: Resolver) -> tuple[Thing, ...]:
    """What an expression gives, from annotations and definitions alone."""
    if node is None or scope.depth > _DEEP:
        return (unknown(f"a value in {scope.module.name}"),)
    scope = scope.deeper()
    match node:
        case ast.Name() | ast.Attribute():
            found = [one for answer in _names(node, scope, resolver, typing=False) for one in answer.things]
            return tuple(found) or (unknown(f"`{ast.unparse(node)}` in {scope.module.name}"),)
        case ast.Call(func=function):
            called = type_of_expression(function, scope, resolver)
            return tuple(one for thing in called for one in resolver.result(thing))
        case ast.IfExp(body=body, orelse=orelse):
            return (*type_of_expression(body, scope, resolver), *type_of_expression(orelse, scope, resolver))
        case ast.BoolOp(values=values):
            return tuple(one for value in values for one in type_of_expression(value, scope, resolver))
        case ast.Constant(value=None):
            return ()
        case ast.Constant(value=value):
            return (outside(f"builtins.{type(value).__name__}"),)
        case ast.Dict() | ast.List() | ast.Set() | ast.Tuple() | ast.ListComp() | ast.DictComp() | ast.SetComp():
            return (Thing("items", type(node).__name__.lower(), elements=(unknown("an item of a literal"),)),)
        case ast.JoinedStr():
            return (outside("builtins.str"),)
    return (unknown(f"`{ast.unparse(node)[:60]}` in {scope.module.name}"),)


def _names(node: ast.expr, scope: Scope, resolver: Resolver, *, typing: bool) -> list[Found]:
    if isinstance(node, ast.Attribute):
        found = []
        for answer in _names(node.value, scope, resolver, typing=typing):
            for thing in answer.things:
                if typing and thing.kind == "module" and thing.module is not None:
                    found += resolver.lookup(thing.module, node.attr, typing=True)
                else:
                    found += resolver.step(thing, node.attr)
        return found
    if not isinstance(node, ast.Name):
        types = type_of_expression(node, scope, resolver)
        return [Found("value", one.where, (one,)) for one in types]
    if not typing:
        local = _local(node.id, scope, resolver)
        if local is not None:
            return [Found("value", one.where, (one,)) for one in local]
    found = resolver.lookup(scope.module, node.id, typing=typing)
    if not found and hasattr(builtins, node.id):
        return [Found("outside", f"builtins.{node.id}", (outside(f"builtins.{node.id}"),))]
    return found


def _local(name: str, scope: Scope, resolver: Resolver) -> tuple[Thing, ...] | None:
    """A parameter or a local variable of the function that the expression stands in."""
    function = scope.function
    if function is None:
        return None
    positional = [*function.args.posonlyargs, *function.args.args]
    if scope.cls is not None and positional and positional[0].arg == name:
        is_class = any(ast.unparse(one) == "classmethod" for one in function.decorator_list)
        return (scope.cls if is_class else instance_of(scope.cls),)
    for one in (*positional, *function.args.kwonlyargs):
        if one.arg == name:
            return types_of_annotation(one.annotation, scope, resolver)
    for statement in ast.walk(function):
        match statement:
            case ast.AnnAssign(target=ast.Name(id=target), annotation=annotation) if target == name:
                return types_of_annotation(annotation, scope, resolver)
            case ast.Assign(targets=targets, value=value):
                if any(isinstance(one, ast.Name) and one.id == name for one in targets):
                    return type_of_expression(value, scope, resolver)
            case ast.ImportFrom(module=module, names=names, level=level):
                for alias in names:
                    if (alias.asname or alias.name) == name:
                        source = scope.module.absolute(module, level)
                        known = resolver.tree.module(source)
                        if known is None:
                            return (outside(f"{source}.{alias.name}"),)
                        return tuple(o for a in resolver.lookup(known, alias.name) for o in a.things) or None
    return None
