"""What names and expressions of our own source stand for, as far as that is vLLM's.

In: an expression, the names bound so far, and rows of `_typed`. Out: paths. Follows imports, annotations, assignments, loops,
attributes of ``self``, ``getattr`` with a literal name, conditional expressions and literal tables; what it cannot follow is not vLLM's
unless a row says so.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

from tf_tools.contract._data import attribute
from tf_tools.contract._typed import Typed

_SAME_TYPE = {"dataclasses.replace", "replace", "copy.copy", "copy.deepcopy"}


@dataclass(frozen=True, slots=True)
class Value:
    """Paths that an expression may stand for; `is_container` marks a literal table or list of them."""

    paths: frozenset[str] = frozenset()
    is_container: bool = False

    def __or__(self, other: Value) -> Value:
        return Value(self.paths | other.paths, self.is_container or other.is_container)

    def step(self, step: str) -> Value:
        """Of ``()``, ``[]``, ``[*]`` or an attribute's name on it."""
        if step in {"()", "[]", "[*]"}:
            if self.is_container:
                return Value(self.paths) if step != "()" else NOTHING
            return Value(frozenset(path + step for path in self.paths if ":" in path))
        return NOTHING if self.is_container else Value(frozenset(attribute(path, step) for path in self.paths))


NOTHING = Value()


@dataclass(slots=True)
class Names:
    """Names in the scopes that enclose a place, innermost last, and the attributes that a class sets on itself."""

    file: str
    rows: tuple[Typed, ...]
    scopes: list[dict[str, Value]] = field(default_factory=lambda: [{}])
    qualname: list[str] = field(default_factory=list)
    attributes: list[dict[str, Value]] = field(default_factory=list)
    matched: set[Typed] = field(default_factory=set)
    branches: int = 0

    def bind(self, name: str, value: Value) -> None:
        """A name gets `value`; inside a branch it keeps what it may have been as well."""
        scope = self.scopes[-1]
        scope[name] = scope.get(name, NOTHING) | value if self.branches else value

    def rows_for(self, node: ast.expr) -> list[Typed]:
        """Rows of `_typed` for this expression in this function."""
        scope = ".".join(self.qualname)
        here = [row for row in self.rows if row.scope == scope]
        if not here:
            return []
        text = ast.unparse(node)
        found = [row for row in here if row.expression == text]
        self.matched.update(found)
        return found

    def infer(self, node: ast.expr | None) -> Value:
        """What `node` stands for; `NOTHING` when that is not vLLM's."""
        if node is None:
            return NOTHING
        # A row for a call is about what is called, except where the call reads an attribute.
        rows = [] if isinstance(node, ast.Call) and not _reads_attribute(node) else self.rows_for(node)
        if rows:
            return Value(frozenset(row.path for row in rows if row.path))
        match node:
            case ast.Name(id=name):
                return next((scope[name] for scope in reversed(self.scopes) if name in scope), NOTHING)
            case ast.Attribute(value=base, attr=attr):
                return self._attribute(node, base, attr)
            case ast.Call():
                return self._call(node)
            case ast.Subscript(value=base):
                return self.infer(base).step("[]")
            case ast.IfExp(body=body, orelse=orelse):
                return self.infer(body) | self.infer(orelse)
            case ast.BoolOp(values=values):
                return self._union(values)
            case ast.NamedExpr(value=value) | ast.Await(value=value):
                return self.infer(value)
            case ast.Dict(values=values):
                return Value(self._union(values).paths, is_container=True)
            case ast.List(elts=values) | ast.Tuple(elts=values) | ast.Set(elts=values):
                return Value(self._union(values).paths, is_container=True)
        return NOTHING

    def _union(self, nodes: Iterable[ast.expr]) -> Value:
        found = NOTHING
        for node in nodes:
            found |= self.infer(node)
        return found

    def _attribute(self, node: ast.Attribute, base: ast.expr, attr: str) -> Value:
        if isinstance(base, ast.Name) and base.id == "self" and self.attributes:
            return self.attributes[-1].get(attr, NOTHING)
        namespace = ast.unparse(base) if isinstance(base, ast.Attribute) else ""
        if namespace in {"torch.ops._C", "torch.ops._moe_C", "torch.ops.vllm"}:
            return Value(frozenset({attribute(namespace, attr)}))
        return self.infer(base).step(attr)

    def _call(self, node: ast.Call) -> Value:
        function = ast.unparse(node.func)
        if function in {"getattr", "inspect.getattr_static"} and len(node.args) >= 2:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                return self.infer(node.args[0]).step(name.value)
            return NOTHING
        if function in _SAME_TYPE and node.args:
            return self.infer(node.args[0])
        if function in {"cast", "typing.cast"} and len(node.args) == 2:
            return self.annotated(node.args[0]) | self.infer(node.args[1])
        if function in {"iter", "list", "tuple", "sorted", "reversed", "enumerate", "zip"}:
            return NOTHING
        return self.called(node).step("()")

    def called(self, node: ast.Call) -> Value:
        """What a call calls: a row for the whole call says it, else the expression before the brackets."""
        rows = [] if _reads_attribute(node) else self.rows_for(node)
        return Value(frozenset(row.path for row in rows if row.path)) if rows else self.infer(node.func)

    def annotated(self, node: ast.expr | None) -> Value:
        """Objects of an annotation's types."""
        match node:
            case ast.Constant(value=str(text)):
                return self.annotated(ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self.annotated(left) | self.annotated(right)
            case ast.Subscript(value=value, slice=inner):
                name = ast.unparse(value).rpartition(".")[2]
                if name == "Optional":
                    return self.annotated(inner)
                return self.infer(inner) if name in {"type", "Type"} else NOTHING
            case ast.Name() | ast.Attribute():
                return self.infer(node).step("()")
        return NOTHING


def _reads_attribute(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == "getattr"
