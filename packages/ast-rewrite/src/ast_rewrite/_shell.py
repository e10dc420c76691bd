"""Compile one definition as its compiler saw it, without running anything around it.

The definition is put inside a function that binds the free variables, so that the compiler makes them free again, and
inside a class of the name that mangles ``__private`` names. Names that the module imports are imported in the shell
too, because CPython compiles ``torch.mul(x)`` in another way when it sees that ``torch`` was imported:

    import torch
    def <ast-rewrite>():
        global LlamaAttention
        cell_name = None
        class LlamaAttention:
            def forward(self, x): ...

Only the code object of the definition is taken out; defaults, decorators and annotations are never evaluated.
"""

from __future__ import annotations
import __future__

import ast
import types
from collections.abc import Iterable
from inspect import CO_NESTED, CO_OPTIMIZED

from ast_rewrite._files import FunctionNode
from ast_rewrite._quiet import compile_quietly

_SHELL = "<ast-rewrite>"  # no identifier, so that it cannot meet a name of the function
_NO_CLASS = "_"  # a class name of underscores mangles nothing
FUTURE_FLAGS = 0
for _name in __future__.all_feature_names:
    FUTURE_FLAGS |= getattr(__future__, _name).compiler_flag
FUTURE_FLAGS &= ~CO_NESTED


def compile_definition(
    node: FunctionNode, like: types.CodeType, *, class_name: str | None, imports: frozenset[str], filename: str
) -> types.CodeType:
    """Compile `node` with the free variables, future flags, nesting and qualified name of `like`.

    Raises SyntaxError if the definition cannot be compiled, ValueError if a free variable is no identifier.
    """
    wrapper = ast.parse("def f():\n class C: pass").body[0]
    assert isinstance(wrapper, ast.FunctionDef)
    shell = wrapper.body[0]
    assert isinstance(shell, ast.ClassDef)
    shell.name, shell.body = class_name or _NO_CLASS, [node]
    # A global class name: else a method that reads the name of its class would find it in the shell.
    apart: list[ast.stmt] = [] if shell.name in like.co_freevars else [ast.Global([shell.name])]
    wrapper.name, wrapper.body = _SHELL, [*apart, *_bindings(like.co_freevars), shell]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    imported: list[ast.stmt] = [ast.Import([ast.alias(name) for name in sorted(imports)])] if imports else []
    for made in (*imported, wrapper, *wrapper.body):
        made.lineno = made.end_lineno = first
        made.col_offset = made.end_col_offset = 0
    module = ast.Module([*imported, wrapper], [])
    code = compile_quietly(ast.fix_missing_locations(module), filename, like.co_flags & FUTURE_FLAGS)
    for name in (_SHELL, shell.name, node.name):
        code = next(
            const
            for const in code.co_consts
            if isinstance(const, types.CodeType) and const.co_name == name and const.co_firstlineno >= first
        )
    code = _requalified(code, code.co_qualname, like.co_qualname)
    return code.replace(co_flags=(code.co_flags & ~CO_NESTED) | (like.co_flags & CO_NESTED))


def stripped(node: FunctionNode) -> FunctionNode:
    """A copy of a definition whose signature evaluates nothing: no decorators, no annotations, defaults of None."""
    arguments = node.args

    def bare(argument: ast.arg) -> ast.arg:
        return ast.copy_location(ast.arg(argument.arg, None), argument)

    def none(default: ast.expr) -> ast.expr:
        return ast.copy_location(ast.Constant(None), default)

    args = ast.arguments(
        posonlyargs=[bare(a) for a in arguments.posonlyargs],
        args=[bare(a) for a in arguments.args],
        vararg=bare(arguments.vararg) if arguments.vararg else None,
        kwonlyargs=[bare(a) for a in arguments.kwonlyargs],
        kw_defaults=[none(d) if d else None for d in arguments.kw_defaults],
        kwarg=bare(arguments.kwarg) if arguments.kwarg else None,
        defaults=[none(d) for d in arguments.defaults],
    )
    fields = {name: getattr(node, name) for name in node._fields if hasattr(node, name)}
    fields.update(args=args, decorator_list=[], returns=None)
    return ast.copy_location(type(node)(**fields), node)


def code_difference(one: types.CodeType, other: types.CodeType, *, layout: bool = False) -> str | None:
    """What differs between two code objects besides file names; None if nothing. Positions count if `layout`."""
    for what in (
        "co_name", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_varnames", "co_freevars",
        "co_cellvars", "co_names", "co_flags", "co_code", "co_exceptiontable",
    ):  # fmt: skip
        mine, others = getattr(one, what), getattr(other, what)
        if what in ("co_freevars", "co_cellvars"):
            mine, others = sorted(mine), sorted(others)
        if mine != others:
            return f"{what} of {one.co_qualname}"
    if layout and list(one.co_positions()) != list(other.co_positions()):
        return f"the layout of {one.co_qualname}"
    if len(one.co_consts) != len(other.co_consts):
        return f"co_consts of {one.co_qualname}"
    for mine, others in zip(one.co_consts, other.co_consts, strict=True):
        if isinstance(mine, types.CodeType) and isinstance(others, types.CodeType):
            if found := code_difference(mine, others, layout=layout):
                return found
        elif _constant_key(mine) != _constant_key(others):
            return f"the constant {mine!r} of {one.co_qualname}"
    return None


def _bindings(names: Iterable[str]) -> list[ast.stmt]:
    statements: list[ast.stmt] = []
    for name in names:
        if not name.isidentifier():
            raise ValueError(f"free variable {name!r} is no identifier")
        statements.append(ast.Assign([ast.Name(name, ast.Store())], ast.Constant(None)))
    return statements


def _requalified(code: types.CodeType, prefix: str, qualname: str) -> types.CodeType:
    """Qualified names of a code object and all inside it, moved from the shell to where the original stands."""

    own = qualname + code.co_qualname[len(prefix) :]
    is_class_body = not code.co_flags & CO_OPTIMIZED

    def moved(const: object) -> object:
        if isinstance(const, types.CodeType):
            return _requalified(const, prefix, qualname)
        return own if is_class_body and const == code.co_qualname else const  # a class body assigns its __qualname__

    return code.replace(co_qualname=own, co_consts=tuple(moved(const) for const in code.co_consts))


def _constant_key(const: object) -> object:
    """Equal only for constants that are the same value of the same type (1 is not True, 0.0 is not -0.0)."""
    if isinstance(const, tuple):
        return tuple, tuple(_constant_key(item) for item in const)
    if isinstance(const, frozenset):
        return frozenset, frozenset(_constant_key(item) for item in const)
    return type(const), repr(const)
