"""Classes of vLLM as their source writes them: their bases and their members.

In: a class `Thing` and the `Names` that resolve its bases. Out: members, each with the class that defines it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeGuard
from weakref import WeakKeyDictionary

from tf_tools.contract._things import Function, Thing
from tf_tools.contract._tree import is_overload

_MEMBERS: WeakKeyDictionary[ast.AST, dict[str, Member]] = WeakKeyDictionary()
"""Members by class definition, for as long as its tree lives."""


class Names(Protocol):
    """What resolves an expression in a module to classes."""

    def bases(self, cls: Thing) -> list[Thing]:
        """The bases of `cls`: classes of vLLM, and outside or unknown things."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A name in a class: a method or class, a class-level value, or an attribute that a method sets on ``self``.

    `method` is the function whose parameters the value's expression may name.
    """

    cls: Thing
    name: str
    node: ast.ClassDef | Function | None = None
    annotation: ast.expr | None = None
    value: ast.expr | None = None
    method: Function | None = None

    @property
    def decorators(self) -> set[str]:
        """Names of decorators, without their arguments."""
        return {decorator_name(one) for one in getattr(self.node, "decorator_list", [])}


def decorator_name(node: ast.expr) -> str:
    """Last part of a decorator's name: ``dataclass`` of ``@dataclasses.dataclass(frozen=True)``."""
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]


def lineage(cls: Thing, names: Names) -> list[Thing]:
    """`cls` and its bases, depth first; the last occurrence of a shared base counts, as in Python's own order."""
    walked: list[Thing] = []

    def walk(one: Thing, depth: int) -> None:
        walked.append(one)
        if one.kind == "class" and depth < 20:
            for base in names.bases(one):
                walk(base, depth + 1)

    walk(cls, 0)
    kept: dict[str, Thing] = {}
    for one in reversed(walked):
        kept.setdefault(one.where, one)
    return list(reversed(kept.values()))


def find_member(cls: Thing, name: str, names: Names) -> Member | None:
    """The member `name` of `cls`, from its own body, its methods, or the nearest base in vLLM."""
    for one in lineage(cls, names):
        if one.kind == "class":
            found = own_members(one).get(name)
            if found is not None:
                return found
    return None


def find_outside(cls: Thing, name: str, names: Names) -> str | None:
    """The base from another library that has `name`, which is imported to see; None when none has."""
    for one in lineage(cls, names):
        if one.kind == "outside":
            try:
                base = _load(one.where)
            except (ImportError, AttributeError):
                continue
            # Statically: the attribute `value` of an enumeration raises on the class.
            if inspect.getattr_static(base, name, None) is not None or hasattr(base, name) or _sets(base, name):
                return f"{one.where}.{name}"
    return None


def _sets(base: object, name: str) -> bool:
    """Whether the source of a class or of one of its bases sets ``self.<name>``."""
    for cls in getattr(base, "__mro__", ()):
        try:
            source = inspect.getsource(cls)
        except (OSError, TypeError):
            continue
        if re.search(rf"\bself\.{name}\s*[:=]", source):
            return True
    return False


def _load(dotted: str) -> object:
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def own_members(cls: Thing) -> dict[str, Member]:
    """Members that the class's own source defines; what the body says goes before what methods set."""
    assert cls.node is not None
    members = _MEMBERS.get(cls.node)
    if members is None:
        members = _MEMBERS[cls.node] = _read_members(cls)
    return members


def _read_members(cls: Thing) -> dict[str, Member]:
    assert isinstance(cls.node, ast.ClassDef)
    members: dict[str, Member] = {}
    methods: list[Function] = []
    for node in statements(cls.node.body):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                methods.append(node)
                if not is_overload(node) and not any(decorator_name(d) == "setter" for d in node.decorator_list):
                    members[name] = Member(cls, name, node=node)
            case ast.ClassDef(name=name):
                members[name] = Member(cls, name, node=node)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                members[name] = Member(cls, name, annotation=annotation, value=value)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    if isinstance(target, ast.Name):
                        members[target.id] = Member(cls, target.id, value=value)
    for method in methods:
        for member in _set_on_self(cls, method):
            known = members.get(member.name)
            # An annotation says more than the first value, which is often None.
            if known is None or (
                known.node is None
                and known.annotation is None
                and (member.annotation is not None or _is_none(known.value))
            ):
                members[member.name] = member
    return members


def _is_none(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a class body, those under a condition included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, part, []))


def _set_on_self(cls: Thing, method: Function) -> Iterator[Member]:
    first = [*method.args.posonlyargs, *method.args.args][:1]
    if not first:
        return
    me = first[0].arg
    for node in ast.walk(method):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    several = isinstance(target, ast.Tuple | ast.List)
                    for one in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                        if _is_attribute_of(one, me):
                            yield Member(cls, one.attr, value=None if several else value, method=method)
            case ast.AnnAssign(target=target, annotation=annotation, value=value) if _is_attribute_of(target, me):
                yield Member(cls, target.attr, annotation=annotation, value=value, method=method)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="register_parameter" | "register_buffer"),
                args=[ast.Constant(value=str(registered)), *_],
            ) if name == me:
                yield Member(cls, registered, method=method)


def _is_attribute_of(node: ast.expr, name: str) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
