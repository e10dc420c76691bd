"""The recorded matrix: what comes with the package, for its pinned versions. Generated, never typed.

In: rows. Out: the data file and the page of documentation; or how rows differ from what is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

import msgspec

from tf_backend.errors import OptionRefused
from tf_backend.zoo.report import Made, as_markdown
from tf_backend.zoo.rows import Row

_DATA = "coverage.jsonl"
_PAGE = Path("docs/coverage.md")
_PLANNED = ("status", "reason", "fusions", "misses", "tensor_2")
"""Fields of a row that planning alone decides; `status` counts as served where it is equal."""


def recorded() -> tuple[Made, tuple[Row, ...]]:
    """What comes with the package.

    Raises:
        OptionRefused: nothing does.
    """
    file = resources.files("tf_backend.zoo").joinpath("data", _DATA)
    if not file.is_file():
        raise OptionRefused(
            "no recorded matrix comes with this package. In a checkout, `tf-backend zoo --record` writes one."
        )
    first, *lines = file.read_bytes().splitlines()
    return msgspec.json.decode(first, type=Made), tuple(msgspec.json.decode(line, type=Row) for line in lines)


def write(rows: Sequence[Row], made: Made) -> tuple[Path, Path]:
    """Write data and page into the checkout that this package runs from.

    A type that was equal in the engine, and is planned now as it was then, stays equal where the engine was not asked again.

    Raises:
        OptionRefused: the package is installed from a wheel, or rows are missing or failed.
    """
    package = Path(__file__).resolve().parents[3]
    if not (package / "pyproject.toml").is_file():
        raise OptionRefused("--record writes into a checkout, and this package is installed elsewhere.")
    failed = [row.name for row in rows if row.status == "failed"]
    if failed:
        raise OptionRefused(f"nothing is recorded while looking at {', '.join(failed[:5])} fails.")
    data, page = Path(__file__).parent / "data" / _DATA, package / _PAGE
    before = {row.name: row for row in recorded()[1]} if data.is_file() else {}
    kept = sorted((_carried(row, before.get(row.name)) for row in rows), key=lambda row: row.name)
    data.parent.mkdir(exist_ok=True)
    data.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (made, *kept)))
    page.parent.mkdir(exist_ok=True)
    page.write_text(as_markdown(kept, made), encoding="utf-8")
    return data, page


def differences(rows: Sequence[Row], made: Made) -> tuple[str, ...]:
    """How `rows` differ from what is recorded, in what planning decides; a line for each change, nothing when there is none."""
    of, known = recorded()
    if of != made:
        return (f"recorded for {_versions(of)}; these are {_versions(made)}: nothing can be compared",)
    before, now = {row.name: row for row in known}, {row.name: row for row in rows}
    lines: list[str] = []
    for name in sorted(before.keys() | now.keys()):
        if name not in now or name not in before:
            lines.append(f"{name}: {'no longer there' if name not in now else 'not recorded'}")
        else:
            lines += [f"{name}: {line}" for line in _changes(before[name], now[name])]
    if lines:
        lines.append("If this is meant, record it: tf-backend zoo --record, and commit what it writes.")
    return tuple(lines)


def _carried(row: Row, old: Row | None) -> Row:
    """`row` with the verdicts of `old` on numbers where it has none of its own and was planned alike."""
    if old is None or row.status not in ("served", "refused") or row.numbers or not (old.numbers or old.serve):
        return row
    on_one_rank = tuple(field for field in _PLANNED if field != "tensor_2")
    if any(True for _ in _changes(old, row, on_one_rank)):
        return row
    return msgspec.structs.replace(row, status=old.status, level=old.level, numbers=old.numbers, serve=old.serve)


def _changes(old: Row, new: Row, fields: Sequence[str] = _PLANNED) -> Iterator[str]:
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


def _planned(row: Row, field: str) -> object:
    """A field as planning decides it: what was found in the engine does not count."""
    if field == "status":
        return "served" if row.status in ("equal", "wrong") and not row.reason.startswith("plan") else row.status
    return getattr(row, field)


def _versions(made: Made) -> str:
    return f"transformers {made.transformers}, torch {made.torch}, {made.capabilities}"
