"""Templates: Python text with ``{name}`` placeholders, each of which stands for one expression.

    "self.act_and_mul({gate_up})"        a call whose argument is the text of the span `gate_up`

Literal braces are doubled, as in ``str.format``.
"""

from __future__ import annotations

import ast
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ast_rewrite._errors import Refused
from ast_rewrite._quiet import parse_expression_quietly, parse_quietly

_HOLE = "_ast_rewrite_hole_"
Mode = Literal["eval", "exec"]


@dataclass(frozen=True, slots=True)
class Template:
    """Literal pieces and, between them, the names of placeholders; ``pieces[i]`` comes before ``names[i]``."""

    pieces: tuple[str, ...]
    names: tuple[str, ...]
    mode: Mode

    @classmethod
    def parse(cls, text: str, mode: Mode) -> Template:
        """Split `text`. Raises ValueError for a placeholder that is more than a name."""
        pieces, names, literal = [], [], ""
        for before, name, form, conversion in string.Formatter().parse(text):
            literal += before
            if name is None:
                continue
            if form or conversion or not (name.isidentifier() or name.isdecimal()):
                raise ValueError(f"placeholder {{{name}}} in {text!r} must be a bare name; double a literal brace")
            pieces.append(literal)
            names.append(name)
            literal = ""
        return cls((*pieces, literal), tuple(names), mode)

    def fill(self, texts: Sequence[str]) -> str:
        """The text with the placeholders, in order of appearance, replaced."""
        out = [self.pieces[0]]
        for text, piece in zip(texts, self.pieces[1:], strict=True):
            out += [text, piece]
        return "".join(out)

    def escaped(self) -> str:
        """The template as it was written: parsing it gives this again."""
        pieces = [piece.replace("{", "{{").replace("}", "}}") for piece in self.pieces]
        return "".join(piece + f"{{{name}}}" for piece, name in zip(pieces, self.names, strict=False)) + pieces[-1]

    def wrapped(self, before: str, after: str) -> Template:
        """The template between two literal texts."""
        pieces = list(self.pieces)
        pieces[0] = before + pieces[0]
        pieces[-1] += after
        return Template(tuple(pieces), self.names, self.mode)

    def tree(self, contents: Sequence[ast.expr]) -> list[ast.AST]:
        """The template parsed, with the placeholders replaced by trees: one expression, or statements.

        Raises Refused if it does not parse, or if a placeholder does not stand for an expression that is read.
        """
        ids = [f"{_HOLE}{at}_" for at in range(len(self.names))]
        parsed = parse(self.fill(ids), self.mode, self.escaped())
        fill = _Fill(dict(zip(ids, contents, strict=True)))
        filled = [fill.visit(node) for node in parsed]
        if sorted(fill.seen) != sorted(ids):
            raise Refused(f"a placeholder of {self.escaped()!r} does not stand for an expression that is read")
        return filled

    def parenthesised(self, texts: Sequence[str], contents: Sequence[ast.expr]) -> Template:
        """The template with parentheses around the placeholders whose text needs them where it is put."""
        pieces = list(self.pieces)
        for at, (text, content) in enumerate(zip(texts, contents, strict=True)):
            ids = [f"{_HOLE}{index}_" for index in range(len(self.names))]
            names: list[ast.expr] = [ast.Name(name, ast.Load()) for name in ids]
            names[at] = content
            meant = self.tree(names)
            ids[at] = text
            if not _parses_to(self.fill(ids), self.mode, meant):
                pieces[at] += "("
                pieces[at + 1] = ")" + pieces[at + 1]
        return Template(tuple(pieces), self.names, self.mode)


def parse(text: str, mode: Mode, shown: str) -> list[ast.AST]:
    """Parse an expression or statements. Raises Refused, showing `shown`, if the text does not parse."""
    try:
        if mode == "eval":
            return [parse_expression_quietly(text.strip())]
        return list(parse_quietly(text, "<template>").body)
    except (SyntaxError, ValueError, RecursionError) as error:
        what = "an expression" if mode == "eval" else "statements"
        raise Refused(f"{shown!r} does not parse as {what}: {error}") from error


def same_tree(one: object, other: object) -> bool:
    """True if two trees, or lists of trees, are equal but for positions."""
    if isinstance(one, ast.AST):
        return type(one) is type(other) and all(
            same_tree(getattr(one, name, None), getattr(other, name, None)) for name in one._fields
        )
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same_tree, one, other))
    return type(one) is type(other) and repr(one) == repr(other)  # 0.0 is not -0.0


def _parses_to(text: str, mode: Mode, meant: Sequence[ast.AST]) -> bool:
    try:
        return same_tree(parse(text, mode, text), meant)
    except Refused:
        return False


class _Fill(ast.NodeTransformer):
    def __init__(self, contents: Mapping[str, ast.expr]) -> None:
        self.contents = contents
        self.seen: list[str] = []

    def visit_Name(self, node: ast.Name) -> ast.expr:
        content = self.contents.get(node.id)
        if content is None or not isinstance(node.ctx, ast.Load):
            return node
        self.seen.append(node.id)
        return content
