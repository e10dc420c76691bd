"""What names and tests of a forward come to in every call, from the arguments that all calls share and from facts about the module.

    is_cross_attention = key_value_states is not None                 # False: no call gives any
    current_states = key_value_states if is_cross_attention else hidden_states      # hidden_states

In: a trace, a patch of the same forward. Out: truth values, and the argument that a name stands for. Nothing is taken from the path that
was traced: only arguments that hold no tensor and that nothing binds again, attributes that the forward leaves alone, and names that are
bound once.
"""

from __future__ import annotations

import ast
import enum
from collections import Counter

from ast_rewrite import Patch, SourceSpan
from fx_match import Trace

from vllm_layers_bridge.fusions.source import receiver

_PLAIN = (bool, int, float, str, type(None))


class _Unknown(enum.Enum):
    UNKNOWN = "unknown"


_UNKNOWN = _Unknown.UNKNOWN


class Settled:
    """Answers for one forward."""

    def __init__(self, trace: Trace, patch: Patch) -> None:
        self.trace, self.source = trace, patch.source
        tree = self.source.tree
        self._me = receiver(self.source)
        self._times = Counter(name for node in ast.walk(tree) for name in _bound(node))
        args = tree.args
        parameters = {argument.arg for argument in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
        self._fixed = {name for name in parameters if self._times[name] == 1}
        self._made = {
            statement.targets[0].id: statement.value
            for statement in tree.body
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1
            if isinstance(statement.targets[0], ast.Name) and self._times[statement.targets[0].id] == 1
        }

    def truth(self, test: ast.expr) -> bool | None:
        """How a test comes out each time; None if that is not known."""
        if isinstance(test, ast.BoolOp):
            found = [self.truth(value) for value in test.values]
            decides = isinstance(test.op, ast.Or)
            if decides in found:
                return decides
            return None if None in found else not decides
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.truth(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.Name) and test.id in self._made:
            return self.truth(self._made[test.id])
        value = self._value(test)
        return None if value is _UNKNOWN else bool(value)

    def origin(self, span: SourceSpan) -> SourceSpan:
        """The place of the argument that the name at `span` stands for, where it was given that name; `span` itself if it is none."""
        node = self.source.expression_at(span)
        while True:
            if isinstance(node, ast.Name) and node.id in self._made:
                node = self._made[node.id]
            elif isinstance(node, ast.IfExp) and (chosen := self.truth(node.test)) is not None:
                node = node.body if chosen else node.orelse
            else:
                return SourceSpan.of(node) if isinstance(node, ast.Name) and node.id in self._fixed else span

    def _value(self, node: ast.expr) -> object:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id in self._made:
                return self._value(self._made[node.id])
            return _plain(self.trace.given.get(node.id, _UNKNOWN)) if node.id in self._fixed else _UNKNOWN
        if isinstance(node, ast.Attribute):
            path = ast.unparse(node).partition(".")
            known = path[0] == self._me and path[2] not in self.trace.changes and self._times[self._me] == 1
            return _plain(self.trace.reads.get(path[2], _UNKNOWN)) if known else _UNKNOWN
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compared(node.ops[0], node.left, node.comparators[0])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            truth = self.truth(node)
            return _UNKNOWN if truth is None else truth
        return _UNKNOWN

    def _compared(self, op: ast.cmpop, left: ast.expr, right: ast.expr) -> object:
        one, two = self._value(left), self._value(right)
        if one is _UNKNOWN or two is _UNKNOWN:
            return _UNKNOWN
        if isinstance(op, ast.Is | ast.IsNot):
            if one is not None and two is not None:
                return _UNKNOWN
            return (one is two) is isinstance(op, ast.Is)
        if isinstance(op, ast.Eq | ast.NotEq):
            return (one == two) is isinstance(op, ast.Eq)
        return _UNKNOWN


def _plain(value: object) -> object:
    return value if isinstance(value, _PLAIN) else _UNKNOWN


def _bound(node: ast.AST) -> list[str]:
    """Names that a node binds, or that code elsewhere may bind."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.Global | ast.Nonlocal):
        return node.names
    if isinstance(node, ast.alias):
        return [(node.asname or node.name).partition(".")[0]]
    if isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar
    ):
        return [node.name] if node.name else []
    return [node.rest] if isinstance(node, ast.MatchMapping) and node.rest else []
