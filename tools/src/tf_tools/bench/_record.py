"""The results file: a head line with the settings, then one line per process, in the order in which they ended.

    {"bench": 1, "model": ..., "code": ..., ...}
    {"mode": "eager", "pair": 0, "arm": "ours", ...}

A file is continued only under the settings, code and machine that began it. A line cut short at the end (the writer
was killed) is dropped; anything else that is no row is an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tf_tools.bench._errors import BenchError
from tf_tools.bench._rows import Row, from_json, to_json

_FORMAT = 1


class Record:
    """The rows of a file, and a way to add to them."""

    def __init__(self, head: Mapping[str, object], rows: Iterable[Row], file: Path) -> None:
        self.head = dict(head)
        self.rows = list(rows)
        self.file = file

    def append(self, row: Row) -> None:
        """Add a row; it is on the disk when this returns."""
        with self.file.open("ab") as stream:
            stream.write(_line(to_json(row)))
            stream.flush()
            os.fsync(stream.fileno())
        self.rows.append(row)

    def last_attempt(self, mode: str, pair: int) -> int:
        """The highest attempt at this pair; 0 when there is none."""
        return max((row.attempt for row in self.rows if (row.mode, row.pair) == (mode, pair)), default=0)

    def pair(self, mode: str, pair: int) -> dict[str, Row]:
        """The rows of the latest attempt at this pair, by arm."""
        attempt = self.last_attempt(mode, pair)
        return {row.arm: row for row in self.rows if (row.mode, row.pair, row.attempt) == (mode, pair, attempt)}

    def pairs(self, mode: str) -> tuple[int, ...]:
        """The pairs of a mode that have any row, priming starts among them."""
        return tuple(sorted({row.pair for row in self.rows if row.mode == mode}))


def read_record(file: Path) -> Record:
    """Raises `BenchError` when the file cannot be read or is not one of ours."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise BenchError(f"{file} cannot be read: {error.strerror}") from error
    lines = data.split(b"\n")[:-1]  # what follows the last line end was cut short
    if not lines:
        raise BenchError(f"{file} holds no results; expected a head line, as --json writes it")
    head = _parsed(file, 1, lines[0])
    if head.pop("bench", None) != _FORMAT:
        raise BenchError(f"{file} does not begin as results of this version (format {_FORMAT}); name another file")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            rows.append(from_json(_parsed(file, number, line)))
        except (KeyError, TypeError) as error:
            raise BenchError(f"{file}, line {number}: not a row of results ({error}); the file was changed") from error
    return Record(head, rows, file)


def open_record(file: Path, head: Mapping[str, object]) -> Record:
    """The record in this file, begun if there is none.

    Raises:
        BenchError: the file holds something else, or was begun under other settings, code or machine.
    """
    if not file.exists() or not file.stat().st_size:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(_line({"bench": _FORMAT, **head}))
        return Record(head, (), file)
    record = read_record(file)
    expected = json.loads(json.dumps(head))
    names = [name for name in {**record.head, **expected} if record.head.get(name) != expected.get(name)]
    if names:
        found = "; ".join(f"{name}: {record.head.get(name)} there, {expected.get(name)} now" for name in names)
        raise BenchError(f"{file} was begun under other conditions ({found}); name another file to begin anew")
    _drop_cut_line(file)
    return record


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Keep a second measurement out of this file, and out of its caches.

    Raises:
        BenchError: another process holds it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BenchError(f"{file} is being written by another measurement; wait for it, or name another") from error
        yield


def _drop_cut_line(file: Path) -> None:
    data = file.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        os.truncate(file, whole)


def _parsed(file: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BenchError(f"{file}, line {number}: not JSON ({error}); the file is damaged, or none of ours") from error
    if not isinstance(value, dict):
        raise BenchError(f"{file}, line {number}: expected a JSON object, found {type(value).__name__}")
    return value


def _line(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, allow_nan=False).encode() + b"\n"
