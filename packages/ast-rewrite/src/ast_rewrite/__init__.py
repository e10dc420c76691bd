"""Patch one function's source at exact spans and compile it back into a function that tools accept."""

from ast_rewrite._compile import CompiledRewrite
from ast_rewrite._edit import Edit
from ast_rewrite._errors import Refused, RewriteError, SourceUnavailable
from ast_rewrite._patch import Patch
from ast_rewrite._positions import span_of_instruction
from ast_rewrite._replay import replay
from ast_rewrite._source import FunctionSource
from ast_rewrite._span import SourceSpan

__all__ = [
    "CompiledRewrite",
    "Edit",
    "FunctionSource",
    "Patch",
    "Refused",
    "RewriteError",
    "SourceSpan",
    "SourceUnavailable",
    "replay",
    "span_of_instruction",
]
