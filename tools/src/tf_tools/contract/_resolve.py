"""Follow a path through the source of one build of vLLM.

In: a path and a `Tree`. Out: what it leads to, with every alternative where a type is a union; or the step at which it ends.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass

from tf_tools.contract._annotations import Scope, type_of_expression, types_of_annotation
from tf_tools.contract._classes import Member, find_member, find_outside
from tf_tools.contract._data import Signature, attribute, split
from tf_tools.contract._options import NAMESPACE, serve_options
from tf_tools.contract._signature import constructor, signature
from tf_tools.contract._things import Found, Function, Thing, found_thing, instance_of, outside, unknown
from tf_tools.contract._tree import Binding, Module, Tree

_PROPERTIES = {"property", "cached_property", "classproperty"}


@dataclass(frozen=True, slots=True, eq=False)
class Resolution:
    """`found` is empty where the path leads nowhere, and `missing` says at which step."""

    found: tuple[Found, ...]
    missing: str = ""


class Resolver:
    """Paths in one tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._open: list[ast.AST] = []
        """Functions whose return statements are being read."""
        self.resolve = functools.cache(self._resolve)
        self.options = functools.cache(lambda: serve_options(self))
        self.bases = functools.cache(self._bases)

    def _resolve(self, path: str) -> Resolution:
        if path.startswith("torch.ops."):
            return self._operator(path)
        if path.startswith(NAMESPACE):
            return self._option(path)
        name, steps = split(path)
        module = self.tree.module(name)
        if module is None:
            return Resolution((), f"there is no module {name}")
        found: tuple[Found, ...] = (found_thing(Thing("module", name, module)),)
        walked = name
        for step in steps:
            things = [thing for one in found for thing in one.things]
            found = prefer([answer for thing in things for answer in self.step(thing, step)])
            before, walked = walked, walked + step if step in {"()", "[]", "[*]"} else attribute(walked, step)
            if not found:
                kinds = " or ".join(sorted({thing.where for thing in things})) or before
                return Resolution((), f"{kinds} has no `{step}`")
        return Resolution(found)

    def _operator(self, path: str) -> Resolution:
        """A compiled operator is there if vLLM's own wrappers call it, and so is everything that torch gives one."""
        namespace, steps = split(path)
        wrappers = self.tree.module("vllm._custom_ops")
        wanted = f"{namespace}.{steps[0]}"
        nodes = ast.walk(wrappers.tree) if wrappers is not None else ()
        if not any(isinstance(node, ast.Attribute) and ast.unparse(node) == wanted for node in nodes):
            return Resolution((), f"vllm._custom_ops calls no {wanted}")
        return Resolution((found_thing(outside(wanted)),))

    def _option(self, path: str) -> Resolution:
        _, steps = split(path)
        if not steps:
            return Resolution((found_thing(outside(NAMESPACE)),))
        where = self.options().get(steps[0])
        if where is None:
            return Resolution((), f"vllm serve has no option --{steps[0].replace('_', '-')}")
        return Resolution((Found("value", where, (outside(NAMESPACE),)),))

    def step(self, thing: Thing, step: str) -> list[Found]:
        """What one step from `thing` leads to; empty when it has no such thing."""
        if thing.kind == "outside" and step not in {"()", "[]", "[*]"}:
            return [found_thing(outside(f"{thing.where}.{step}"))]
        if thing.kind in {"outside", "unknown"}:
            return [found_thing(thing)]
        if step == "()":
            return [Found("value", one.where, (one,)) for one in self.result(thing)]
        if step in {"[]", "[*]"}:
            chosen = thing.keys if step == "[*]" and thing.kind == "mapping" else thing.elements
            if thing.kind in {"items", "mapping"}:
                return [Found("value", one.where, (one,)) for one in chosen]
            return [found_thing(unknown(f"an item of {thing.where}"))]
        if thing.kind == "module":
            assert thing.module is not None
            return self.lookup(thing.module, step)
        if thing.kind in {"class", "instance"}:
            return self._member(thing, step)
        if thing.kind == "mapping" and step in {"get", "pop", "setdefault"}:
            return [Found("outside", f"dict.{step}", (Thing("function", f"dict.{step}", elements=thing.elements),))]
        return [found_thing(outside(f"{thing.where}.{step}"))]

    def lookup(
        self, module: Module, name: str, *, typing: bool = False, seen: frozenset[str] = frozenset()
    ) -> list[Found]:
        """A name of a module. `typing` also takes what only type checkers see, and prefers it."""
        mark = f"{module.name}:{name}"
        if mark in seen:
            return []
        seen |= {mark}
        if name in module.lazy:
            source, original = module.lazy[name]
            return self._imported(source, original, typing, seen)
        bindings = module.bindings.get(name, [])
        if typing:
            bindings = [one for one in bindings if one.typing_only] or bindings
        else:
            bindings = [one for one in bindings if not one.typing_only] or (bindings if module.has_getattr else [])
        if bindings:
            return self._bound(module, name, _best(bindings), typing, seen)
        below = self.tree.module(f"{module.name}.{name}") if module.is_package else None
        if below is not None:
            return [found_thing(Thing("module", below.name, below))]
        for star in module.stars:
            answer = self._imported(star, name, typing, seen)
            if answer:
                return answer
        return []

    def _bound(self, module: Module, name: str, binding: Binding, typing: bool, seen: frozenset[str]) -> list[Found]:
        node, where = binding.node, f"{module.name}:{name}"
        if node is None:
            if binding.name is None:
                known = self.tree.module(binding.module)
                return [found_thing(Thing("module", binding.module, known) if known else outside(binding.module))]
            return self._imported(binding.module, binding.name, typing, seen)
        if isinstance(node, ast.ClassDef):
            return [found_thing(Thing("class", where, module, node))]
        if isinstance(node, Function):
            return [found_thing(Thing("function", where, module, node))]
        scope = Scope(module)
        if isinstance(node, ast.AnnAssign):
            types = types_of_annotation(node.annotation, scope, self)
            return [Found("value", where, types, ast.unparse(node.annotation), node.value)]
        assert isinstance(node, ast.Assign)
        return [Found("value", where, type_of_expression(node.value, scope, self), "", node.value)]

    def _imported(self, source: str, name: str, typing: bool, seen: frozenset[str]) -> list[Found]:
        if source.partition(".")[0] != "vllm":
            return [found_thing(outside(f"{source}.{name}"))]
        module = self.tree.module(source)
        if module is None:
            return []
        return self.lookup(module, name, typing=typing, seen=seen)

    def _bases(self, cls: Thing) -> list[Thing]:
        assert isinstance(cls.node, ast.ClassDef)
        assert cls.module is not None
        found = []
        for base in cls.node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            found += [one for one in type_of_expression(plain, Scope(cls.module), self) if one.kind != "instance"]
        return found

    def _member(self, thing: Thing, name: str) -> list[Found]:
        cls = thing if thing.kind == "class" else Thing("class", thing.where, thing.module, thing.node)
        member = find_member(cls, name, self)
        if member is None:
            other = find_outside(cls, name, self) or (f"builtins.object.{name}" if hasattr(object, name) else None)
            return [found_thing(outside(other))] if other else []
        return [self._found_member(thing, cls, member)]

    def _found_member(self, thing: Thing, cls: Thing, member: Member) -> Found:
        where, scope = f"{member.cls.where}.{member.name}", Scope(_module(member.cls), member.method, cls)
        if isinstance(member.node, ast.ClassDef):
            return found_thing(Thing("class", where, scope.module, member.node))
        if isinstance(member.node, Function):
            if member.decorators & _PROPERTIES:
                returns = member.node.returns
                inner = Scope(scope.module, member.node, cls)
                types = types_of_annotation(returns, inner, self)
                return Found("value", where, types, ast.unparse(returns) if returns else "")
            is_bound = "classmethod" in member.decorators or (
                thing.kind == "instance" and "staticmethod" not in member.decorators
            )
            return found_thing(Thing("function", where, scope.module, member.node, cls, is_bound))
        if member.annotation is not None:
            return Found(
                "value", where, types_of_annotation(member.annotation, scope, self), ast.unparse(member.annotation)
            )
        if self._is_enum(cls):
            return Found("value", where, (instance_of(cls),), "", member.value)
        types = (unknown(f"{where} has no type"),) if member.value is None else ()
        return Found("value", where, types or type_of_expression(member.value, scope, self), "", member.value)

    def _is_enum(self, cls: Thing) -> bool:
        return any(one.where.rpartition(".")[2].endswith(("Enum", "Flag")) for one in self.bases(cls))

    def result(self, thing: Thing) -> tuple[Thing, ...]:
        """What a call of `thing` gives."""
        if thing.kind == "class":
            return (instance_of(thing),)
        if thing.kind == "instance":
            return tuple(one for called in self._called_instance(thing) for one in self.result(called))
        if thing.kind != "function":
            return (unknown(f"a call of {thing.where}"),) if thing.kind != "outside" else (thing,)
        if thing.node is None:
            return thing.elements
        assert isinstance(thing.node, Function)
        scope = Scope(_module(thing), thing.node, thing.owner)
        if thing.node.returns is not None:
            return types_of_annotation(thing.node.returns, scope, self)
        if thing.node in self._open:
            return (unknown(f"{thing.where}, which calls itself"),)
        self._open.append(thing.node)
        returned = [node.value for node in ast.walk(thing.node) if isinstance(node, ast.Return)]
        found = [one for value in returned for one in type_of_expression(value, scope, self)]
        self._open.pop()
        return tuple(found) or (unknown(f"the result of {thing.where}"),)

    def _called_instance(self, thing: Thing) -> list[Thing]:
        """The function behind a call of an object: ``__call__``, or ``forward`` of a torch module."""
        cls = Thing("class", thing.where, thing.module, thing.node)
        for name in ("__call__", "forward"):
            member = find_member(cls, name, self)
            if member is not None:
                return [one for one in self._found_member(thing, cls, member).things if one.kind == "function"]
        return []

    def signature(self, thing: Thing) -> tuple[Signature, Thing] | None:
        """Parameters of a call of `thing`, and whose source defines them; None where the source does not say."""
        if thing.kind == "class":
            parameters = constructor(thing, self)
            return None if parameters is None else (parameters, thing)
        if thing.kind == "instance":
            return next((found for one in self._called_instance(thing) if (found := self.signature(one))), None)
        if thing.kind == "function" and isinstance(thing.node, Function):
            return signature(thing.node, is_bound=thing.is_bound), thing
        return None


def prefer(found: list[Found]) -> tuple[Found, ...]:
    """Of the alternatives of a union: what vLLM defines, else what another library does, else what is unknown."""
    for kinds in ({"module", "class", "function", "value"}, {"outside"}, {"unknown"}):
        chosen = [one for one in found if one.kind in kinds]
        if chosen:
            return tuple({(one.kind, one.where): one for one in chosen}.values())
    return ()


def _best(bindings: list[Binding]) -> Binding:
    """Of several bindings of one name: a definition, then an import, then an annotation, then the last value that is not None."""

    def rank(binding: Binding) -> int:
        match binding.node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return 4
            case None:
                return 3
            case ast.AnnAssign():
                return 2
            case ast.Assign(value=ast.Constant(value=None)):
                return 0
        return 1

    return max(reversed(bindings), key=rank)


def _module(thing: Thing) -> Module:
    assert thing.module is not None
    return thing.module
