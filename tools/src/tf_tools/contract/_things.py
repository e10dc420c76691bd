"""What a name or an expression in vLLM's source stands for.

A `Thing` is what attributes are read from and what is called; a `Found` is one answer to the question what a path leads to.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal

from tf_tools.contract._data import FoundKind
from tf_tools.contract._tree import Module

Function = ast.FunctionDef | ast.AsyncFunctionDef
ThingKind = Literal["module", "class", "instance", "function", "items", "mapping", "outside", "unknown"]


@dataclass(frozen=True, slots=True, eq=False)
class Thing:
    """`where` is ``module:qualname`` for what vLLM defines, a dotted name for what others do, and the reason for an unknown.

    Args:
        owner: class of a method.
        is_bound: a function whose first parameter is filled already.
        elements: what a container holds; for a mapping, its values.
        keys: of a mapping.
    """

    kind: ThingKind
    where: str
    module: Module | None = None
    node: ast.ClassDef | Function | None = None
    owner: Thing | None = None
    is_bound: bool = False
    elements: tuple[Thing, ...] = ()
    keys: tuple[Thing, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """One alternative; `things` are what the next step starts from."""

    kind: FoundKind
    where: str
    things: tuple[Thing, ...]
    annotation: str = ""
    value: ast.expr | None = None


def unknown(why: str) -> Thing:
    """What cannot be told from the source."""
    return Thing("unknown", why)


def outside(name: str) -> Thing:
    """What another library defines."""
    return Thing("outside", name)


def instance_of(cls: Thing) -> Thing:
    """An object of a class; of another library's class, that class's name again."""
    return Thing("instance", cls.where, cls.module, cls.node) if cls.kind == "class" else cls


def found_thing(thing: Thing) -> Found:
    """A definition as an answer."""
    kinds: dict[ThingKind, FoundKind] = {
        "module": "module",
        "class": "class",
        "function": "function",
        "outside": "outside",
        "unknown": "unknown",
    }
    return Found(kinds.get(thing.kind, "value"), thing.where, (thing,))
