"""From a traced node to the text that made it.

In: a trace, a patch of the same forward, a node. Out: spans. Raises `ast_rewrite.Refused` wherever the text is not plainly what the graph
shows: a node made in a helper has the span of the call that led there, and replacing that call would lose the rest of the helper.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

import fx_match
from ast_rewrite import FunctionSource, Patch, Refused, SourceSpan
from fx_match import Guard, Trace, is_inplace
from torch import fx

from vllm_layers_bridge.fusions.children import other_use
from vllm_layers_bridge.fusions.reachable import mention_elsewhere

_CALLED_ALIKE = frozenset({"dtype", "device", "ndim", "layout"})
"""Properties of a tensor that all instances of a variant find the same: they were called alike."""

_OF_ATTRIBUTES = (
    ast.Attribute, ast.Name, ast.Load, ast.Constant, ast.UnaryOp, ast.Not, ast.BoolOp, ast.boolop, ast.Compare, ast.cmpop,
)  # fmt: skip

_PLAIN = (
    ast.BinOp, ast.Mult, ast.Call, ast.Attribute, ast.Name, ast.Load, ast.Constant, ast.keyword,
)  # fmt: skip


def source_span(trace: Trace, node: fx.Node) -> SourceSpan:
    """The span of the expression of the forward itself that made `node`."""
    location = trace.location(node)
    if location.span is None or location.helper_span is not None or location.function != trace.code.co_name:
        where = f"in `{location.function}`, {location}" if location.function else "at no known place"
        raise Refused(f"`{node.name}` was made {where}, and only the forward itself is rewritten")
    return own_span(location.span)


def argument_span(patch: Patch, call: SourceSpan) -> SourceSpan:
    """The span of the one argument of the call at `call`."""
    expression = patch.source.expression_at(call)
    if not isinstance(expression, ast.Call):
        raise Refused("there is no call where one was traced", call)
    arguments = [*expression.args, *(keyword.value for keyword in expression.keywords)]
    if len(arguments) != 1 or isinstance(arguments[0], ast.Starred) or any(k.arg is None for k in expression.keywords):
        raise Refused(f"the call has {len(arguments)} arguments, expected one", call)
    return SourceSpan.of(arguments[0])


def receiver_span(patch: Patch, cut: SourceSpan) -> SourceSpan:
    """The span of what is cut up: ``x`` of ``x[..., :n]``, ``x.chunk(2)``, ``torch.chunk(x, 2)`` and ``torch.Tensor.chunk(x, 2)``."""
    expression = patch.source.expression_at(cut)
    if isinstance(expression, ast.Subscript):
        return SourceSpan.of(expression.value)
    if isinstance(expression, ast.Call):
        func = expression.func
        if isinstance(func, ast.Attribute) and not _is_from_outside(patch.source, func.value):
            return SourceSpan.of(func.value)
        if expression.args and not isinstance(expression.args[0], ast.Starred):
            return SourceSpan.of(expression.args[0])
    raise Refused("there is no call and no subscript where the linear's output was cut", cut)


def projection_spans(
    trace: Trace, patch: Patch, node: fx.Node, *, settles_presence: bool = False
) -> tuple[SourceSpan, SourceSpan]:
    """The spans of ``self.name(x)`` and of its argument, for the call of a child that is to go away.

    Raises Refused also where the forward uses the child in another way, or mentions it in code that may still run. With `settles_presence`
    the forward may ask whether it has the child: the caller answers in its place, see `settle_presence`.
    """
    require_same_forward(trace, patch)
    if (use := other_use(trace, node)) is not None:
        raise Refused(use[1])
    span = source_span(trace, node)
    argument = argument_span(patch, span)
    call = patch.source.expression_at(span)
    assert isinstance(call, ast.Call)
    path = f"{receiver(patch.source)}.{node.target}"
    if ast.unparse(call.func) != path:
        raise Refused(f"`{node.target}` is called as `{ast.unparse(call.func)}`, expected `{path}`", span)
    _require_no_other_mention(trace, patch, call, path, settles_presence)
    return span, argument


def require_same_forward(trace: Trace, patch: Patch) -> None:
    """Raises Refused unless the patch is of the very function that was traced."""
    patched, traced = patch.source.function.__code__, trace.code
    same = ("co_filename", "co_firstlineno", "co_name")
    if any(getattr(patched, name) != getattr(traced, name) for name in same):
        raise Refused(
            f"the forward that runs is {traced.co_filename}:{traced.co_firstlineno}, not the one of its class"
        )


def is_path_known(trace: Trace) -> bool:
    """Whether all instances of the variant run the traced path each time: it ended, and hung on no size or value of the sample, nor on
    what the forward itself changes."""
    return trace.complete and all(_is_known_to_all(guard, trace) for guard in trace.guards)


def pure_calls(trace: Trace) -> Callable[[ast.Call], bool]:
    """For edits that compute an input elsewhere: whether a call of the forward writes to none of the tensors that are traced.

    What a helper did in the trace it does always, unless it asked for a size. Of a call that is not known to have run, on a path that
    hangs on the sample, nothing is known.
    """
    asked = [span for guard in trace.guards if not _is_known_to_all(guard, trace) and (span := guard.span) is not None]
    wrote = [span for node in trace.graph.nodes if is_inplace(node) and (span := trace.span(node)) is not None]
    ran = [span for node in trace.graph.nodes if (span := trace.span(node)) is not None]
    is_known = is_path_known(trace)

    def is_pure(call: ast.Call) -> bool:
        span = SourceSpan.of(call)
        if not trace.complete or any(span.contains(own_span(other)) for other in (*asked, *wrote)):
            return False
        return is_known or any(span.contains(own_span(other)) for other in ran)

    return is_pure


def decided_tests(trace: Trace, patch: Patch) -> Callable[[ast.expr], bool]:
    """Tells of a test in the forward that it came out alike for all instances of the variant: it asks for nothing but their attributes.

    Of two branches, every instance then takes the one that was traced.
    """
    me = receiver(patch.source)
    written = {
        ast.unparse(node)
        for node in ast.walk(patch.source.tree)
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
    }

    def is_decided(test: ast.expr) -> bool:
        nodes = list(ast.walk(test))
        return (
            is_path_known(trace)
            and all(isinstance(node, _OF_ATTRIBUTES) for node in nodes)
            and all(node.id == me for node in nodes if isinstance(node, ast.Name))
            and written.isdisjoint(ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute))
        )

    return is_decided


def settle_presence(patch: Patch, child: str) -> None:
    """Replace ``self.child is not None`` by True, and the contrary by False: the child that goes away is there in the variant."""
    path = f"{receiver(patch.source)}.{child}"
    for node in ast.walk(patch.source.tree):
        if _is_presence(node, path):
            assert isinstance(node, ast.Compare)
            patch.replace(SourceSpan.of(node), str(isinstance(node.ops[0], ast.IsNot)))


def require_nothing_lost(trace: Trace, patch: Patch, span: SourceSpan, kept: SourceSpan) -> None:
    """Raises Refused if the expression at `span`, which is to go but for what lies at `kept`, does more than what the graph shows."""
    shown = {own_span(own) for node in trace.graph.nodes if (own := trace.location(node).span) is not None}
    stack: list[ast.AST] = [patch.source.expression_at(span)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.expr) and SourceSpan.of(node) == kept:
            continue
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            raise Refused("an expression that would go binds a name or suspends the function", SourceSpan.of(node))
        if isinstance(node, ast.Call) and SourceSpan.of(node) not in shown:
            raise Refused(f"{ast.unparse(node)} would go, and what it does is not known", SourceSpan.of(node))
        stack.extend(ast.iter_child_nodes(node))


def stands_for_itself(source: FunctionSource, span: SourceSpan, inputs: tuple[SourceSpan, ...]) -> bool:
    """Whether the expression computes the same on every path to it.

    It does if, beside `inputs`, it is made of nothing but products and calls of attributes of ``self`` and of names from outside.
    """
    try:
        root = source.expression_at(span)
        skipped = [source.expression_at(given) for given in inputs]
    except Refused:
        return False
    known = {receiver(source)} | (set(source.function.__code__.co_names) - _locals(source))
    stack: list[ast.AST] = [root]
    while stack:
        node = stack.pop()
        if any(node is given for given in skipped):
            continue
        if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Mult):
            return False
        if not isinstance(node, _PLAIN):
            return False
        if isinstance(node, ast.Name) and node.id not in known:
            return False
        stack.extend(ast.iter_child_nodes(node))
    return True


def _require_no_other_mention(trace: Trace, patch: Patch, call: ast.Call, path: str, settles_presence: bool) -> None:
    """A call elsewhere that was not traced is on a path that the variant never takes; any other use may run unseen."""
    calls = {id(node.func) for node in ast.walk(patch.source.tree) if isinstance(node, ast.Call)}
    tests = (node for node in ast.walk(patch.source.tree) if isinstance(node, ast.Compare) and _is_presence(node, path))
    asked = {id(node.left) for node in tests} if settles_presence else set()
    for node in ast.walk(patch.source.tree):
        if not isinstance(node, ast.Attribute) or node is call.func or ast.unparse(node) != path or id(node) in asked:
            continue
        if id(node) not in calls:
            raise Refused(f"the forward uses `{path}` beside calling it, and it would be gone", SourceSpan.of(node))
        if not is_path_known(trace):
            raise Refused(
                f"`{path}` is called here too, on a path that depends on the sample, or on an earlier call",
                SourceSpan.of(node),
            )
    child = path.rpartition(".")[2]
    if not is_path_known(trace) and (where := mention_elsewhere(trace, child)) is not None:
        raise Refused(
            f"`{where}` may use `{path}`, which would be gone, on a path that depends on the sample, or on an earlier call"
        )


def _is_presence(node: ast.AST, path: str) -> bool:
    """Whether a node is ``path is None`` or ``path is not None``."""
    return (
        isinstance(node, ast.Compare)
        and ast.unparse(node.left) == path
        and len(node.ops) == 1
        and isinstance(node.ops[0], ast.Is | ast.IsNot)
        and isinstance(node.comparators[0], ast.Constant)
        and node.comparators[0].value is None
    )


def _is_known_to_all(guard: Guard, trace: Trace) -> bool:
    """Whether all instances of a variant find what the guard is about the same, each time."""
    if guard.kind == "attribute":
        return guard.name not in trace.changes
    return guard.kind == "value" and guard.name in _CALLED_ALIKE


def _is_from_outside(source: FunctionSource, node: ast.AST) -> bool:
    """Whether an expression is a name of the module's, such as ``torch``, or an attribute of one."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id not in _locals(source)


def own_span(span: fx_match.SourceSpan) -> SourceSpan:
    """A span of the trace as one of the patch."""
    return SourceSpan(span.lineno, span.col, span.end_lineno, span.end_col)


def receiver(source: FunctionSource) -> str:
    """The name by which the forward knows its module, ``self`` as a rule."""
    args = source.tree.args
    named = [*args.posonlyargs, *args.args]
    return named[0].arg if named else ""


def _locals(source: FunctionSource) -> set[str]:
    code = source.function.__code__
    return {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
