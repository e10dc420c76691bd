"""Edits as data: what was asked of a patch, in order, enough to do it again in another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ast_rewrite._span import SourceSpan

Kind = Literal["replace", "insert", "delete"]


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of the text.

    Attributes:
        kind: ``replace`` an expression, ``insert`` statements before one, ``delete`` a statement.
        span: the expression replaced; the statement inserted before or deleted.
        text: the template, parenthesised where its place needs it; empty for a deletion.
        holes: name and span of each placeholder of the template.
        dropping: spans inside which earlier edits may be lost.
    """

    kind: Kind
    span: SourceSpan
    text: str = ""
    holes: tuple[tuple[str, SourceSpan], ...] = ()
    dropping: tuple[SourceSpan, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain lists, strings and numbers, for ``json.dumps``."""
        return {
            "kind": self.kind,
            "span": _numbers(self.span),
            "text": self.text,
            "holes": {name: _numbers(span) for name, span in self.holes},
            "dropping": [_numbers(span) for span in self.dropping],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Edit:
        """The inverse of `to_json`. Raises KeyError, TypeError or ValueError on other data."""
        kind = data["kind"]
        if kind not in ("replace", "insert", "delete"):
            raise ValueError(f"unknown kind of edit {kind!r}; expected replace, insert or delete")
        return cls(
            kind,
            SourceSpan(*data["span"]),
            str(data["text"]),
            tuple((str(name), SourceSpan(*span)) for name, span in data["holes"].items()),
            tuple(SourceSpan(*span) for span in data["dropping"]),
        )


def _numbers(span: SourceSpan) -> list[int]:
    return [span.lineno, span.col, span.end_lineno, span.end_col]
