"""What every edit must satisfy, whatever it is for."""

from __future__ import annotations

import ast
import builtins
import dis
import types
from collections.abc import Sequence

from ast_rewrite._errors import Refused
from ast_rewrite._flow import Flow
from ast_rewrite._names import bound_by, bound_names, parameters, paths_read, read_names
from ast_rewrite._order import COMPREHENSIONS, LOOPS, evaluated
from ast_rewrite._render import Placed, Rendering
from ast_rewrite._source import FunctionSource
from ast_rewrite._span import SourceSpan

_ONCE = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)


def require_place(source: FunctionSource, placed: Sequence[Placed], new: Placed) -> None:
    """Raises Refused if an earlier edit took the place away, or would be lost in the new edit."""
    if new.edit.kind == "insert":
        _require_line(source, new)
        return
    for old in placed:
        if old.edit.kind == "insert":
            continue
        same = (old.low, old.high) == (new.low, new.high)
        if old.low <= new.low and new.high <= old.high and (not same or old.edit.kind == "delete"):
            if old.edit.kind == "delete":
                raise Refused("the statement was deleted by an earlier edit", new.edit.span)
            if not old.carries(new.low, new.high, source):
                raise Refused("an earlier edit replaced what contains this and did not keep it", new.edit.span)
        elif new.low <= old.low and old.high <= new.high and _is_visible(source, placed, old):
            lost = not new.carries(old.low, old.high, source)
            if lost and not any(span.contains(old.edit.span) for span in new.edit.dropping):
                raise Refused(
                    "an earlier edit in here would be lost; keep it in a placeholder, or drop it", old.edit.span
                )


def require_same_values(source: FunctionSource, placed: Sequence[Placed], new: Placed) -> None:
    """Raises Refused if a placeholder is filled from a place where what it reads may have another value."""
    foreign = [
        hole for hole in new.holes if new.edit.kind == "insert" or not new.edit.span.contains(SourceSpan.of(hole))
    ]
    if not foreign:
        return
    flow = Flow(source, Rendering(source, placed).current())
    for hole in foreign:
        there, here = flow.now(hole), flow.now(new.node)
        if isinstance(here, ast.stmt):
            start = next(evaluated(here))
            if flow.index[there] >= flow.index[start]:
                nodes = flow.region(None, there, start=here)
            else:
                flow.require_sequence(there, start)
                nodes = flow.region(there, start)
        else:
            one, two = sorted((there, here), key=lambda node: flow.index[node])
            flow.require_sequence(one, two)
            nodes = flow.region(one, two)
        for path in dict.fromkeys(paths_read(there)):
            flow.require_unchanged(path, nodes)


def require_no_capture(candidate: Rendering, new: Placed) -> None:
    """Raises Refused if an edit binds a name that means something else where it, or the function, reads it."""
    outside = _read_from_outside(candidate.source.function.__code__)
    stand_ins = [ast.Name("_", ast.Load()) for _ in new.holes]
    for child in (child for node in new.template.tree(stand_ins) for child in ast.walk(node)):
        if taken := sorted(set(bound_by(child)) & outside):
            raise Refused(f"the edit binds {taken[0]}, which the function reads from outside", new.edit.span)
        if isinstance(child, (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, *COMPREHENSIONS)):
            own, inside = bound_names([child]), set(ast.walk(child))
            for hole, stand_in in zip(new.holes, stand_ins, strict=True):
                if stand_in in inside and (caught := sorted(own & read_names(hole))):
                    raise Refused(
                        f"{caught[0]} of the placeholder would be that of a function or comprehension in the template",
                        SourceSpan.of(hole),
                    )


def require_evaluated_once(rendering: Rendering) -> None:
    """Raises Refused if a call that a placeholder copied is still evaluated in its old place. After `rendering.text()`."""
    source = rendering.source
    for node in (node for statement in source.tree.body for node in ast.walk(statement)):
        if isinstance(node, _ONCE):
            span = SourceSpan.of(node)
            at = source.offset(*span.end) - 1 if isinstance(node, ast.Call) else source.offset(*span.start)
            if sum(start <= at < end for start, end in rendering.emitted) > 1:
                raise Refused(f"{ast.unparse(node)} was copied and would be evaluated twice", span)


def require_names_known(rendering: Rendering) -> None:
    """Raises Refused if the text of an edit reads a name that is bound nowhere, or only after it."""
    source = rendering.source
    current = rendering.current()
    tree = current.tree
    outside = known_names(source) | set(dir(builtins)) | {"__class__"}
    own = set(bound_names([tree]))
    given = set(parameters(tree)) | set(source.function.__code__.co_freevars)
    order = {node: at for at, node in enumerate(node for s in tree.body for node in evaluated(s))}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load) or node in current.origins:
            continue
        if node.id not in own and node.id not in outside:
            raise Refused(f"an edit reads {node.id}, which is no name of the function, its module or the builtins")
        if node.id in own - given and node in order:
            loops = [loop for loop in ast.walk(tree) if isinstance(loop, LOOPS) and node in set(ast.walk(loop))]
            sooner = {n for loop in loops for n in ast.walk(loop)} | {n for n in order if order[n] < order[node]}
            if not any(node.id in bound_by(n) for n in sooner):
                raise Refused(f"an edit reads {node.id} before anything binds it")


def known_names(source: FunctionSource) -> set[str]:
    """Names that mean something in the function as it was: a new variable must have another."""
    function = source.function
    names = {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name)} | bound_names([source.tree])
    return names | set(function.__code__.co_freevars) | set(function.__globals__)


def _is_visible(source: FunctionSource, placed: Sequence[Placed], edit: Placed) -> bool:
    """True unless another edit took the place of this one without keeping it."""
    return all(
        outer is edit
        or outer.edit.kind == "insert"
        or not (outer.low <= edit.low and edit.high <= outer.high)
        or ((outer.low, outer.high) == (edit.low, edit.high) and outer.order < edit.order)
        or outer.carries(edit.low, edit.high, source)
        for outer in placed
    )


def _require_line(source: FunctionSource, new: Placed) -> None:
    """Raises Refused where no statement can be put before this one."""
    assert isinstance(new.node, ast.stmt)
    if source.text.encode()[new.low : new.high].startswith(b"elif"):
        raise Refused("no statement can stand before an elif", new.edit.span)
    if not Rendering(source, ()).starts_line(new.node):
        statements = new.template.tree(new.holes)
        if len(statements) != 1 or hasattr(statements[0], "body") or "\n" in new.edit.text:
            raise Refused(
                "the statement shares its line, so only one simple statement can be put before it", new.edit.span
            )


def _read_from_outside(code: types.CodeType) -> set[str]:
    """Names that a function, or one nested in it, reads from its module, its closure or the builtins."""
    names = set(code.co_freevars)
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            names.add(str(instruction.argval))
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _read_from_outside(const) - set(code.co_varnames) - set(code.co_cellvars)
    return names
