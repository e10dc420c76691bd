"""What a node of a syntax tree may write to.

Taken not to write to what they are given: calls of attributes (methods such as ``x.view(2)``, functions such as
``torch.cat(xs)``, modules such as ``self.act(x)``), unless the name ends in one underscore, is that of a method that changes
a list, dict or set, or ``out=`` or ``inplace=`` is passed. A call of a plain name (``apply_rotary(q, k)``) may write to all that
it is given. Where the caller's `pure` can tell, it decides instead: what it does not vouch for may write to all that it is given.
"""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

from ast_rewrite._files import FunctionNode
from ast_rewrite._names import Path, bound_by, bound_names, declared_outside, parameters, path_of
from ast_rewrite._source import FunctionSource

Pure = Callable[[ast.Call], bool]

# fmt: off
_CONTAINER_METHODS = frozenset({
    "append", "extend", "insert", "pop", "popitem", "remove", "clear", "update", "setdefault", "sort", "reverse", "add",
    "discard", "appendleft", "popleft", "__setitem__", "__delitem__", "__setattr__", "__delattr__",
})
_METADATA = frozenset({"shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad"})
_METADATA_CALLS = frozenset({"size", "dim", "numel", "stride", "get_device", "is_contiguous"})
_FRESH_RESULTS = frozenset({
    "len", "isinstance", "issubclass", "int", "float", "bool", "str", "repr", "type", "id", "hash", "range", "hasattr",
    "callable",
})
_HARMLESS = _FRESH_RESULTS | {
    "abs", "min", "max", "sum", "round", "print", "getattr", "tuple", "list", "dict", "set", "frozenset", "zip",
    "enumerate", "sorted", "reversed", "any", "all", "slice", "super", "format", "ord", "chr", "divmod", "pow",
}
_DOUBT = "is not known to leave its arguments alone"
_EXCEPTIONS = frozenset(n for n, v in vars(builtins).items() if isinstance(v, type) and issubclass(v, BaseException))
_FRAMES = frozenset({"exec", "eval", "locals", "globals", "vars", "dir"})
# fmt: on


class Names:
    """What the names of a function are, as far as all questions about it share."""

    def __init__(self, source: FunctionSource, tree: FunctionNode) -> None:
        self.outside = declared_outside(tree)
        self.local = bound_names([tree])
        self.made_here = _functions_made_in(tree)
        self.bindings = [pair for node in ast.walk(tree) for pair in _bindings(node)]
        self.containers = {argument.arg for argument in (tree.args.vararg, tree.args.kwarg) if argument is not None}
        self.parameters = set(parameters(tree))
        self.free = set(source.function.__code__.co_freevars)
        self.receiver = source.receiver


class Writes:
    """Tells why a node may change the value of one path."""

    def __init__(
        self,
        names: Names,
        origins: Mapping[ast.AST, ast.AST],
        path: Path,
        pure: Pure | None,
        fresh: Collection[ast.AST],
    ) -> None:
        self.names, self.origins, self.path, self.pure, self.fresh = names, origins, path, pure, fresh
        self.is_global = bool(path) and path[0] not in names.local
        self.related = names.parameters | names.free | set(path[:1])
        grown = True
        while grown:  # whatever is bound from a related name is related
            grown = False
            for bound, value in names.bindings:
                if not bound <= self.related and (value is None or self._mentions(value)):
                    self.related |= bound
                    grown = True

    def reason(self, node: ast.AST, *, memory: bool = True) -> str | None:
        """Why evaluating this node (not those under it) may change the path; None if it cannot.

        ``memory=False`` asks only whether the names and attributes of the path are bound anew.
        """
        if not self.path:
            return None
        root = self.path[0]
        if root in bound_by(node):
            return f"{root} is bound again"
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            return self._attribute_store(node, memory)
        if isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.AsyncFor | ast.AsyncWith):
            return "other code runs here"
        if isinstance(node, ast.Call):
            return self._call(node, memory)
        if not memory:
            return None
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if isinstance(node.value, ast.Name) and node.value.id in self.names.containers - {root}:
                return None
            return self._stored_into(node.value)
        if isinstance(node, ast.AugAssign):
            return self._stored_into(node.target)
        return None

    def _attribute_store(self, node: ast.Attribute, memory: bool) -> str | None:
        stored = path_of(node)
        if stored is not None and stored[0] == self.path[0]:
            shared = min(len(stored), len(self.path))
            return f"{'.'.join(stored)} is assigned" if stored[:shared] == self.path[:shared] else None
        if not self._mentions(node.value):
            return None
        if node.attr == "data" and not memory:
            return None
        direct = isinstance(node.value, ast.Name) and node.value.id != self.names.receiver and len(self.path) == 1
        if node.attr in ("data", *self.path[1:]) or (direct and memory):
            return f"attribute {node.attr} of an object that may be the same is assigned"
        return None

    def _call(self, node: ast.Call, memory: bool) -> str | None:
        func = node.func
        name = func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else None
        if isinstance(func, ast.Name) and name in _FRAMES and name not in self.names.local:
            return f"{name}() can reach every variable"
        origin = self.origins.get(node)  # a call that an edit brought has none
        is_doubted = self.pure is not None and isinstance(origin, ast.Call)
        if self.pure is not None and isinstance(origin, ast.Call) and self.pure(origin):
            return None
        if self.is_global and memory and not (isinstance(func, ast.Name) and name in _HARMLESS):
            return f"{self.path[0]} is a global or free variable, which the code called here can rebind"
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(func, ast.Name) and name not in self.names.local:
            if name in ("setattr", "delattr"):
                return self._passed(given, f"{name}() changes an object")
            if name in _HARMLESS or name in _EXCEPTIONS:
                return None
        if not memory:
            return None
        for keyword in node.keywords:
            is_off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            if keyword.arg in ("out", "inplace") and not is_off:
                receiver = [func.value] if isinstance(func, ast.Attribute) else []
                return self._passed([*receiver, *given], f"{name or 'the callee'} is called with {keyword.arg}=")
        if isinstance(func, ast.Attribute):
            if func.attr.endswith("_") and not func.attr.endswith("__"):
                return self._passed([func.value, *given], f"{func.attr}() works in place")
            if func.attr in _CONTAINER_METHODS:
                path = path_of(func.value)
                apart = path is not None and path[0] != self.path[0] and path[0] in self.names.parameters
                return None if apart else self._passed([func.value], f"{func.attr}() changes an object")
            is_metadata = func.attr in _METADATA_CALLS
            return (
                self._passed([func.value, *given], f"{func.attr}() {_DOUBT}")
                if is_doubted and not is_metadata
                else None
            )
        if isinstance(func, ast.Subscript) and not is_doubted:
            return None
        if isinstance(func, ast.Name) and func.id in self.names.made_here:
            return None  # what its body does is looked at by itself
        bound = [func] if is_doubted and isinstance(func, ast.Name) else []  # it may be a method of a tensor
        return self._passed([*bound, *given], f"{name or 'the callee'} {_DOUBT}")

    def _passed(self, given: list[ast.expr], why: str) -> str | None:
        for value in given:
            if self._mentions(value):
                return f"{why}, and {ast.unparse(value)} may share memory with {'.'.join(self.path)}"
        return None

    def _stored_into(self, target: ast.expr) -> str | None:
        if self._mentions(target):
            return f"{ast.unparse(target)} is changed in place, and may share memory with {'.'.join(self.path)}"
        return None

    def _mentions(self, node: ast.AST) -> bool:
        """True if the value of an expression may share memory with an argument, a free variable or the path."""
        if node in self.fresh or isinstance(node, ast.Constant | ast.Compare):
            return False
        if isinstance(node, ast.Attribute) and node.attr in _METADATA and isinstance(node.ctx, ast.Load):
            return False
        if isinstance(node, ast.Call):
            func = node.func
            if isinstance(func, ast.Attribute) and func.attr in _METADATA_CALLS:
                return False
            if isinstance(func, ast.Name) and func.id in _FRESH_RESULTS and func.id not in self.names.local:
                return False
        if isinstance(node, ast.Name):
            return node.id in self.related
        return any(self._mentions(child) for child in ast.iter_child_nodes(node))


def _functions_made_in(tree: ast.AST) -> set[str]:
    """Names of nested functions that are bound once, so that a call of the name runs that body."""
    bound = Counter(name for node in ast.walk(tree) for name in bound_by(node))
    return {
        node.name
        for node in ast.walk(tree)
        if node is not tree and isinstance(node, ast.FunctionDef) and not node.decorator_list and bound[node.name] == 1
    }


def _bindings(node: ast.AST) -> Iterator[tuple[set[str], ast.AST | None]]:
    """Names and what they take their value from; None where that is not an expression."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield _targets(target), node.value
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
        if node.value is not None:
            yield _targets(node.target), node.value
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield _targets(node.target), node.iter
    elif isinstance(node, ast.withitem):
        if node.optional_vars is not None:
            yield _targets(node.optional_vars), node.context_expr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        path = path_of(node.func.value)
        for value in (*node.args, *(keyword.value for keyword in node.keywords)):
            if path is not None and node.func.attr in _CONTAINER_METHODS:
                yield {path[0]}, value
    elif isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar
    ):
        if node.name:
            yield {node.name}, None
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield {node.rest}, None
    elif isinstance(node, ast.arg):
        yield {node.arg}, None  # of a nested function or a lambda


def _targets(target: ast.expr) -> set[str]:
    """Names that an assignment binds, or whose object it stores something into."""
    if isinstance(target, ast.Tuple | ast.List):
        return {name for element in target.elts for name in _targets(element)}
    if isinstance(target, ast.Starred):
        return _targets(target.value)
    while isinstance(target, ast.Attribute | ast.Subscript):
        target = target.value
    return {target.id} if isinstance(target, ast.Name) else set()
