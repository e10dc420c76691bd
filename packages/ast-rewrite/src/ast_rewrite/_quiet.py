"""Parse and compile without the warnings that the import of the same text gave already."""

from __future__ import annotations

import ast
import types
import warnings


def parse_quietly(text: str, filename: str) -> ast.Module:
    """``ast.parse``, silent about invalid escapes and the like, also where warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, filename)


def parse_expression_quietly(text: str) -> ast.expr:
    """The same for one expression."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, mode="eval").body


def compile_quietly(tree: ast.Module, filename: str, flags: int) -> types.CodeType:
    """``compile`` of a module, silent about ``"a" is "b"`` and the like, also where warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = compile(tree, filename, "exec", flags=flags, dont_inherit=True)
    assert isinstance(code, types.CodeType)
    return code
