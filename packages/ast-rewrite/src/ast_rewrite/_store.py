"""Where rewritten text lies, for those who read it: debuggers, tracebacks, people.

Files are named by the hash of their bytes. What runs is compiled from text in memory and never read back, so nobody can
change what runs by changing a file here.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import tempfile
from pathlib import Path

from ast_rewrite._layout import physical_lines


def default_folder() -> Path:
    """``AST_REWRITE_CACHE`` if set, else ``ast-rewrite`` in the user's cache folder (``XDG_CACHE_HOME``, ``~/.cache``)."""
    if override := os.environ.get("AST_REWRITE_CACHE"):
        return Path(override).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification has relative paths ignored
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "ast-rewrite"


def store(text: str, *, name: str, sha256: str, folder: Path | None) -> str:
    """Write `text` unless those bytes are there already, make it known to ``linecache``, and return its file name.

    Nothing is raised where the folder cannot be written: the text is then known to ``linecache`` alone.
    """
    path = (folder or default_folder()).absolute() / f"{re.sub(r'[^A-Za-z0-9_.]', '_', name)[:80]}-{sha256[:20]}.py"
    with contextlib.suppress(OSError):
        _write(path, text.encode())
    # No modification time: checkcache() leaves such an entry alone.
    linecache.cache[str(path)] = (len(text), None, physical_lines(text), str(path))
    return str(path)


def _write(path: Path, data: bytes) -> None:
    with contextlib.suppress(OSError):
        if path.read_bytes() == data:
            return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
