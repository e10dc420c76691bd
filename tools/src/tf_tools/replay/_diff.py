"""How two dumps differ.

In: two folders. Out: a `Change` for each type whose text is another, with a unified diff.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Change:
    """One type: `diff` is unified, of the old text and the new one; a text that is not there is empty."""

    name: str
    diff: str


def compare(old: Path, new: Path) -> Iterator[Change]:
    """Changes in order of name."""
    names = sorted({file.relative_to(root).as_posix() for root in (old, new) for file in root.rglob("*.txt")})
    for name in names:
        before, after = (_lines(root / name) for root in (old, new))
        if before != after:
            diff = difflib.unified_diff(before, after, f"old/{name}", f"new/{name}", lineterm="")
            yield Change(name.removesuffix(".txt"), "\n".join(diff))


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.is_file() else []
