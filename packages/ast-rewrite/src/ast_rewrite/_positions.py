"""From an instruction of running code to the span it came from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from functools import lru_cache
from itertools import islice

from ast_rewrite._shell import FUTURE_FLAGS
from ast_rewrite._source import FunctionSource
from ast_rewrite._span import SourceSpan

_PROGRAM = """
import json, sys
text, filename, key, flags = json.loads(sys.stdin.buffer.read())
def find(code):
    for const in code.co_consts:
        if hasattr(const, "co_code"):
            if [const.co_firstlineno, const.co_qualname] == key:
                return const
            if (found := find(const)) is not None:
                return found
code = find(compile(text, filename, "exec", flags, dont_inherit=True))
print(json.dumps(None if code is None else [code.co_code.hex(), list(code.co_positions())]))
"""


def span_of_instruction(source: FunctionSource, code: types.CodeType, lasti: int) -> SourceSpan | None:
    """The span of the instruction at byte offset `lasti` (``frame.f_lasti``) of `code`; None if it has no position.

    `code` is that of ``source.function``, or a copy of it, or of a function nested in it: file, first line and name are
    compared, not identity. Where the interpreter keeps no columns (``PYTHONNODEBUGRANGES``), the file is compiled again by a
    second interpreter that does.

    Raises:
        ValueError: `code` is not of this function, or `lasti` is no offset in it.
    """
    known = _family(source.function.__code__).get((code.co_filename, code.co_firstlineno, code.co_name))
    if known is None:
        raise ValueError(f"{code.co_qualname} of {code.co_filename}:{code.co_firstlineno} is not of {source.qualname}")
    if lasti % 2 or not 0 <= lasti < len(code.co_code):
        raise ValueError(f"{lasti} is no instruction of {code.co_qualname}, which has {len(code.co_code)} bytes")
    line, end_line, column, end_column = next(islice(code.co_positions(), lasti // 2, None), (None, None, None, None))
    if line is None:
        return None
    if column is None or end_column is None or end_line is None:
        again = _with_columns(source.filename, source.file_text, known)
        if again is None or again[0] != code.co_code.hex():
            return None
        line, end_line, column, end_column = again[1][lasti // 2]
    if line is None or end_line is None or column is None or end_column is None:
        return None
    if (end_line, end_column) < (line, column):
        return None
    return source.normalised(SourceSpan(line, column, end_line, end_column))


def _family(code: types.CodeType) -> dict[tuple[str, int, str], types.CodeType]:
    found = {(code.co_filename, code.co_firstlineno, code.co_name): code}
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            for key, nested in _family(const).items():
                found.setdefault(key, nested)
    return found


@lru_cache(maxsize=64)
def _with_columns(
    filename: str, text: str, code: types.CodeType
) -> tuple[str, list[tuple[int | None, int | None, int | None, int | None]]] | None:
    """Code bytes and positions of the same function, from an interpreter that keeps columns."""
    key = [code.co_firstlineno, code.co_qualname]
    request = json.dumps([text, filename, key, code.co_flags & FUTURE_FLAGS])
    command = [sys.executable, "-I", "-S", *["-O"] * sys.flags.optimize, "-c", _PROGRAM]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONNODEBUGRANGES"}
    try:
        done = subprocess.run(
            command, input=request.encode(), capture_output=True, env=environment, timeout=60, check=True
        )
        answer = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return None if answer is None else (answer[0], [tuple(position) for position in answer[1]])
