"""How rows of one type differ: what planning said before, and what it says now.

In: rows. Out: lines. Lines of source are left out where two releases are compared: a release moves them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from tf_backend.zoo.rows import Row

PLANNED = ("status", "reason", "fusions", "misses", "tensor_2")
"""Fields of a row that planning alone decides; `status` counts as served where it is equal."""

_PLACE = r"(?:lines? [\d:-]+|at \d+:\d+-\d+:\d+(?:, \d+:\d+-\d+:\d+)*)"
_PLACES = re.compile(rf" ?\({_PLACE}\)|,? ?\b{_PLACE}")


def changes(old: Row, new: Row, fields: Sequence[str] = PLANNED) -> Iterator[str]:
    """A line for each thing that `new` has otherwise than `old`."""
    for field in fields:
        before, after = _planned(old, field), _planned(new, field)
        if before == after:
            continue
        if field == "misses":
            yield from (f"no longer missed: {miss}" for miss in old.misses if miss not in new.misses)
            yield from (f"missed now: {miss}" for miss in new.misses if miss not in old.misses)
        elif field == "fusions":
            names = dict.fromkeys((*old.fusions, *new.fusions))
            counts = ((name, old.fusions.get(name, 0), new.fusions.get(name, 0)) for name in names)
            yield from (f"{name}: {was} modules, now {are}" for name, was, are in counts if was != are)
        else:
            yield f"{field.replace('tensor_2', 'two ranks')}: {before or 'nothing'}\n    now: {after or 'nothing'}"


def without_lines(row: Row) -> Row:
    """`row` with no line of source in what it says."""
    return msgspec.structs.replace(
        row,
        reason=_PLACES.sub("", row.reason),
        misses=tuple(_PLACES.sub("", miss) for miss in row.misses),
        tensor_2=_PLACES.sub("", row.tensor_2),
    )


def _planned(row: Row, field: str) -> object:
    """A field as planning decides it: what was found in the engine does not count."""
    if field == "status":
        return "served" if row.status in ("equal", "wrong") and not row.reason.startswith("plan") else row.status
    return getattr(row, field)
