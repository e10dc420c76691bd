"""What one build of vLLM has at the paths that we use.

In: a tree, uses, claims. Out: a `Surface`, which can be stored and needs no vLLM to be checked against.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable

from tf_tools.contract._claims import Claim, Implemented
from tf_tools.contract._classes import lineage, own_members
from tf_tools.contract._data import Definition, Entry, Signature, Surface, Use
from tf_tools.contract._resolve import Resolver
from tf_tools.contract._signature import signature
from tf_tools.contract._things import Found, Function, Thing
from tf_tools.contract._tree import Tree


def survey(tree: Tree, uses: Iterable[Use], claims: Iterable[Claim]) -> Surface:
    """Definitions of everything that `uses` and `claims` name, or why it is missing."""
    resolver = Resolver(tree)
    kinds: dict[str, set[str]] = {}
    for use in uses:
        if use.kind == "untyped":
            continue
        kinds.setdefault(use.path, set()).add(use.kind)
    claimed = {claim.path: isinstance(claim, Implemented) for claim in claims}
    entries = {}
    for path in sorted({*kinds, *claimed}):
        resolution = resolver.resolve(path)
        definitions = tuple(
            _definition(found, resolver, kinds.get(path, set()), claimed.get(path)) for found in resolution.found
        )
        entries[path] = Entry(definitions, resolution.missing)
    return Surface(tree.source, tree.sha256, entries)


def _definition(found: Found, resolver: Resolver, kinds: set[str], is_interface: bool | None) -> Definition:
    parameters: Signature | None = None
    body = ""
    bases: tuple[str, ...] = ()
    if "call" in kinds:
        for thing in found.things:
            answer = resolver.signature(thing)
            if answer is not None:
                parameters, body = answer[0], _digest(answer[1])
    if "subclass" in kinds and found.kind == "class":
        bases = tuple(one.where for one in lineage(found.things[0], resolver))
    value = _literal(found.value) if is_interface is False else None
    members = _members(found.things[0], resolver) if is_interface and found.kind == "class" else None
    return Definition(found.kind, found.where, found.annotation, parameters, body, value, bases, members)


def _digest(thing: Thing) -> str:
    """Of a definition's source without blanks, so that formatting does not count."""
    assert thing.module is not None
    assert thing.node is not None
    lines = thing.module.text.splitlines()[thing.node.lineno - 1 : thing.node.end_lineno]
    return hashlib.sha256("".join("".join(lines).split()).encode()).hexdigest()[:16]


def _literal(node: ast.expr | None) -> object:
    """A literal; of a table with other values, also as the argument of a call, its keys with None for each that is none."""
    if isinstance(node, ast.Call) and len(node.args) == 1:
        node = node.args[0]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(key.value): _literal(value) for key, value in pairs if isinstance(key, ast.Constant)}
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _members(cls: Thing, resolver: Resolver) -> dict[str, Signature]:
    found: dict[str, Signature] = {}
    for one in lineage(cls, resolver):
        if one.kind == "class":
            for name, member in own_members(one).items():
                if isinstance(member.node, Function):
                    found.setdefault(name, signature(member.node, is_bound=True))
    return dict(sorted(found.items()))
