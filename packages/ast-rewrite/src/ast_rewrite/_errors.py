"""Everything this package raises on purpose."""

from __future__ import annotations

from ast_rewrite._span import SourceSpan


class RewriteError(Exception):
    """Base of the errors of ast_rewrite."""


class SourceUnavailable(RewriteError):
    """The source of a function cannot be had, or is not the source of the code that runs.

    C functions, lambdas, code made by ``exec``, a file that changed on disk since it was imported, a module
    whose code was rewritten while it was imported.
    """


class Refused(RewriteError):
    """An edit, or a rebuilt decorator chain, that cannot be proved safe. The patch stays as it was.

    Attributes:
        reason: what was found, what was expected.
        span: the place in the original file that decided, where there is one.
    """

    def __init__(self, reason: str, span: SourceSpan | None = None) -> None:
        super().__init__(reason if span is None else f"{reason} (at {span})")
        self.reason = reason
        self.span = span

    def __reduce__(self) -> tuple[type[Refused], tuple[str, SourceSpan | None]]:
        return Refused, (self.reason, self.span)
