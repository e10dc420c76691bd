"""Where an expression stands in its file."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class SourceSpan:
    """A range of source text, as in ``ast`` nodes and ``code.co_positions()``.

    Lines are absolute in the file and start at 1. Columns are UTF-8 byte offsets in their line and start at 0;
    the end is exclusive.
    """

    lineno: int
    col: int
    end_lineno: int
    end_col: int

    def __post_init__(self) -> None:
        if self.lineno < 1 or self.col < 0 or self.end_col < 0 or self.end < self.start:
            raise ValueError(f"not a span: ({self.lineno}, {self.col}) to ({self.end_lineno}, {self.end_col})")

    @classmethod
    def of(cls, node: ast.expr | ast.stmt) -> SourceSpan:
        """The span of a node that was parsed from text."""
        if node.end_lineno is None or node.end_col_offset is None:
            raise ValueError(f"{type(node).__name__} has no end position")
        return cls(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)

    @property
    def start(self) -> tuple[int, int]:
        """(line, column) of the first byte."""
        return self.lineno, self.col

    @property
    def end(self) -> tuple[int, int]:
        """(line, column) after the last byte."""
        return self.end_lineno, self.end_col

    def contains(self, other: SourceSpan) -> bool:
        """True if `other` lies in this span; a span contains itself."""
        return self.start <= other.start and other.end <= self.end

    def overlaps(self, other: SourceSpan) -> bool:
        """True if the two spans share at least one byte."""
        return self.start < other.end and other.start < self.end

    def __str__(self) -> str:
        return f"{self.lineno}:{self.col}-{self.end_lineno}:{self.end_col}"
