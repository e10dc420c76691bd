"""Recorded edits, done again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ast_rewrite._compile import CompiledRewrite
from ast_rewrite._edit import Edit
from ast_rewrite._errors import Refused
from ast_rewrite._patch import Patch
from ast_rewrite._source import FunctionSource


def replay(
    fn: Callable[..., Any], edits: Sequence[Edit], *, source_sha256: str, sha256: str, folder: Path | None = None
) -> CompiledRewrite:
    """Do recorded edits again on the same function, in another process.

    Raises Refused if the function's source, or the result, is not the one that was recorded.
    """
    source = FunctionSource.of(fn)
    if source.sha256 != source_sha256:
        raise Refused(
            f"the source of {source.qualname} has hash {source.sha256}; the edits were made for {source_sha256}"
        )
    patch = Patch(source)
    for edit in edits:
        patch._redo(edit)
    made = patch.compile(folder=folder)
    if made.sha256 != sha256:
        raise Refused(f"the edits of {source.qualname} give text of hash {made.sha256}; expected {sha256}")
    return made
