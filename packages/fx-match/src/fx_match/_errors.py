"""Exceptions. What a traced module does never raises: it ends in a `Stop`. These are for misuse of the library."""


class FxMatchError(Exception):
    """Base of every error of fx-match."""


class TraceInputError(FxMatchError, TypeError):
    """`trace` was called with something that it cannot run: not a module, no such method, arguments that do not bind."""


class PatternError(FxMatchError, ValueError):
    """A pattern is malformed: an unknown option, a capture name used for two kinds of thing, an empty alternative."""
