"""Patch one function's source at exact spans and compile it back into a function that tools accept."""

from ast_rewrite._errors import Refused, RewriteError, SourceUnavailable
from ast_rewrite._source import FunctionSource
from ast_rewrite._span import SourceSpan

__all__ = ["FunctionSource", "Refused", "RewriteError", "SourceSpan", "SourceUnavailable"]
