"""The layout of source text: byte offsets, logical lines, indentation.

Strings that run over several lines keep every byte: they are values, not layout.
"""

from __future__ import annotations

import io
import tokenize
from dataclasses import dataclass

_QUIET = {tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_OPENS = {getattr(tokenize, name) for name in ("FSTRING_START", "TSTRING_START") if hasattr(tokenize, name)}
_CLOSES = {getattr(tokenize, name) for name in ("FSTRING_END", "TSTRING_END") if hasattr(tokenize, name)}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where logical lines start and end in a piece of text, and which physical lines start inside a string.

    Rows count from 0; columns are UTF-8 bytes.
    """

    starts: frozenset[tuple[int, int]]
    ends: frozenset[tuple[int, int]]
    in_string: frozenset[int]


def layout(text: str) -> Layout:
    """Read the layout of text, indented or not. Raises ``tokenize.TokenError`` or ``SyntaxError`` on broken text."""
    lines = text.split("\n")
    starts: set[tuple[int, int]] = set()
    ends: set[tuple[int, int]] = set()
    in_string: set[int] = set()
    previous: tokenize.TokenInfo | None = None
    opened: list[int] = []

    def place(row: int, column: int) -> tuple[int, int]:
        return row - 1, len(lines[row - 1][:column].encode())

    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING:
            in_string.update(range(token.start[0], token.end[0]))
        elif token.type in _OPENS:
            opened.append(token.start[0])
        elif token.type in _CLOSES:
            in_string.update(range(opened.pop(), token.end[0]))
        if token.type == tokenize.NEWLINE:
            if previous is not None:
                ends.add(place(*previous.end))
            previous = None
        elif token.type not in _QUIET:
            if previous is None:
                starts.add(place(*token.start))
            previous = token
    return Layout(frozenset(starts), frozenset(ends), frozenset(in_string))


def reindent(text: str, *, remove: str = "", add: str = "") -> str:
    """Take `remove` from the front of each line and put `add` there, leaving lines inside strings as they are.

    A line that is indented less than `remove` (a comment, the inside of brackets) loses what it has.
    """
    inside = layout(text).in_string
    out: list[str] = []
    for row, line in enumerate(physical_lines(text)):
        if row in inside:
            out.append(line)
            continue
        if line.startswith(remove):
            line = line[len(remove) :]
        else:
            shared = 0
            while shared < min(len(remove), len(line)) and line[shared] == remove[shared]:
                shared += 1
            line = line[shared:]
        out.append(add + line if line.strip() else line)
    return "".join(out)


def indentation(line: str) -> str:
    """The white space that a line starts with."""
    return line[: len(line) - len(line.lstrip(" \t\f"))]


def physical_lines(text: str) -> list[str]:
    """Lines with their line feeds. Unlike ``str.splitlines``, form feeds and the like end no line, as in Python source."""
    pieces = text.split("\n")
    return [piece + "\n" for piece in pieces[:-1]] + ([pieces[-1]] if pieces[-1] else [])
