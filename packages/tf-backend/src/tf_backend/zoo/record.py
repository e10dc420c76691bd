"""The recorded matrices: what comes with the package, one for each release of transformers that is followed. Generated, never typed.

In: rows. Out: the data file of a release and the page of documentation, which is made of all; or how rows differ from what is recorded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import msgspec

from tf_backend.errors import OptionRefused
from tf_backend.zoo.changes import PLANNED, changes
from tf_backend.zoo.report import Made, Matrix, as_markdown
from tf_backend.zoo.rows import Row

_NAME = "transformers-{}.jsonl"
_PAGE = Path("docs/coverage.md")


def matrices() -> tuple[Matrix, ...]:
    """All that comes with the package, the oldest release first: that is the one which serving is developed with."""
    return tuple(sorted((_read(file) for file in _files()), key=lambda matrix: _order(matrix.made.transformers)))


def recorded(release: str) -> Matrix | None:
    """What comes with the package for a release of transformers, if anything does."""
    file = _folder().joinpath(_NAME.format(release))
    return _read(file) if file.is_file() else None


def write(rows: Sequence[Row], made: Made) -> tuple[Path, Path]:
    """Write the data of the release in `made`, and the page, into the checkout that this package runs from.

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
    data, page = Path(__file__).parent / "data" / _NAME.format(made.transformers), package / _PAGE
    known = recorded(made.transformers)
    before = {row.name: row for row in known.rows} if known is not None else {}
    kept = sorted((_carried(row, before.get(row.name)) for row in rows), key=lambda row: row.name)
    data.parent.mkdir(exist_ok=True)
    data.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (made, *kept)))
    page.parent.mkdir(exist_ok=True)
    page.write_text(as_markdown(matrices()), encoding="utf-8")
    return data, page


def differences(rows: Sequence[Row], made: Made) -> tuple[str, ...]:
    """How `rows` differ from what is recorded for their release, in what planning decides; a line for each change."""
    of = recorded(made.transformers)
    if of is None:
        releases = ", ".join(matrix.made.transformers for matrix in matrices()) or "none"
        return (f"nothing is recorded for transformers {made.transformers} (recorded: {releases})",)
    if of.made != made:
        return (f"recorded for {_versions(of.made)}; these are {_versions(made)}: nothing can be compared",)
    before, now = {row.name: row for row in of.rows}, {row.name: row for row in rows}
    lines: list[str] = []
    for name in sorted(before.keys() | now.keys()):
        if name not in now or name not in before:
            lines.append(f"{name}: {'no longer there' if name not in now else 'not recorded'}")
        else:
            lines += [f"{name}: {line}" for line in changes(before[name], now[name])]
    if lines:
        lines.append("If this is meant, record it: tf-backend zoo --record, and commit what it writes.")
    return tuple(lines)


def _folder() -> Traversable:
    return resources.files("tf_backend.zoo").joinpath("data")


def _files() -> list[Traversable]:
    return [file for file in _folder().iterdir() if file.name.endswith(".jsonl")] if _folder().is_dir() else []


def _read(file: Traversable) -> Matrix:
    first, *lines = file.read_bytes().splitlines()
    return Matrix(msgspec.json.decode(first, type=Made), tuple(msgspec.json.decode(line, type=Row) for line in lines))


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release))


def _carried(row: Row, old: Row | None) -> Row:
    """`row` with the verdicts of `old` on numbers and of the engine where it has none of its own and was planned alike."""
    if old is None or row.status not in ("served", "refused") or row.serve or not (old.numbers or old.serve):
        return row
    on_one_rank = tuple(field for field in PLANNED if field != "tensor_2")
    if any(True for _ in changes(old, row, on_one_rank)):
        return row
    if row.numbers and not old.serve:
        return row
    numbers = row.numbers or old.numbers
    return msgspec.structs.replace(row, status=old.status, level=old.level, numbers=numbers, serve=old.serve)


def _versions(made: Made) -> str:
    return f"transformers {made.transformers}, torch {made.torch}, {made.capabilities}"
