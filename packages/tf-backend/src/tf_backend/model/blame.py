"""Which fields of a config keep a model from being made of it: those by whose change alone it can be made.

In: the values of a config.json, and what is tried with them. Out: the fields, found by experiment, as far as that goes.

    {"hidden_act": "nope", ...}                       Correct "hidden_act": "nope" there.
    {"vocab_size": 10, "pad_token_id": 30, ...}       Correct one of "vocab_size": 10, "pad_token_id": 30 there.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

Attempt: TypeAlias = Callable[[dict[str, Any]], object]
"""Raises where no model can be made of the values that it is given."""

_IDENTITY = ("model_type", "architectures", "auto_map")
"""What model it is, which is given: without them it would be another, or none."""
_LONGEST = 10.0
"""Seconds after which no further attempt is made: a large model takes one of them on meta."""
_MOST = 4
"""Fields of which each alone would do it. Where there are more, none of them is to blame."""
_SHOWN = 60
"""Characters of a value."""

_Path: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Blame:
    """Fields as they are shown, ``"hidden_act": "nope"``; each of them would do it, or `together` both. Without any it is false."""

    fields: tuple[str, ...] = ()
    together: bool = False

    def __bool__(self) -> bool:
        return bool(self.fields)

    def remedy(self, where: str = "there") -> str:
        """A sentence that tells what to correct; `where` if the file was not named before."""
        if not self.fields:
            return f"Correct the values {where}."
        if self.together:
            return f"Correct {' and '.join(self.fields)} {where}."
        return f"Correct {'one of ' if len(self.fields) > 1 else ''}{', '.join(self.fields)} {where}."


def find_blame(values: Mapping[str, Any], attempt: Attempt) -> Blame:
    """The fields by whose change `attempt` does not raise any more: one, or one of several, or two that are wrong at once.

    A change is to leave a field out, or to make a number 1. Where no such change is found in time, what the first error is about.
    """
    with _silence():
        first = _outcome(attempt, dict(values))
        if first is None:
            return Blame()
        end = time.monotonic() + _LONGEST
        alone: list[_Path] = []
        other: list[_Path] = []
        for path in _paths(values):
            if any(found[: len(path)] == path for found in alone) or time.monotonic() > end:
                continue  # a part of it is to blame
            found = [_outcome(attempt, changed) for changed in _changes(values, path)]
            if None in found:
                alone.append(path)
            elif any(outcome != first for outcome in found):
                other.append(path)
        alone = [path for path in alone if _is_no_size(_value(values, path))] or alone
        if alone:
            return Blame(tuple(_shown(values, path) for path in alone)) if len(alone) <= _MOST else Blame()
        pair = next(_pairs(values, attempt, other, end), ())
        if pair:
            return Blame(tuple(_shown(values, path) for path in pair), together=True)
    other = [path for path in other if not any(below != path and below[: len(path)] == path for below in other)]
    said = [path for path in other if path[-1] in first[1] or json.dumps(_value(values, path), default=str) in first[1]]
    meant = said or (other if len(other) == 1 else [])
    meant = [path for path in meant or other if _is_no_size(_value(values, path))] or meant
    return Blame(tuple(_shown(values, path) for path in meant)) if len(meant) <= _MOST else Blame()


def find_size_to_blame(values: Mapping[str, Any], attempt: Attempt) -> Blame:
    """The whole numbers below 1 by whose change `attempt` does not raise any more: for attempts that take their time."""
    end = time.monotonic() + _LONGEST
    found: list[_Path] = []
    with _silence():
        for path in _whole_numbers(values):
            if not _is_no_size(_value(values, path)):
                continue
            for changed in _changes(values, path):
                if time.monotonic() < end and path not in found and _outcome(attempt, changed) is None:
                    found.append(path)
    return Blame(tuple(_shown(values, path) for path in found))


def find_numbers_to_blame(values: Mapping[str, Any], attempt: Attempt, likely: Collection[int]) -> Blame:
    """The whole numbers by whose change to 1 `attempt` does not raise any more: one, or one of several, or two that are wrong at once.

    For what a model fails with when it runs: other fields turn a part of it off, which tells nothing. Fields with one of the values in
    `likely` are tried first, and others only where none of those is to blame.
    """
    with _silence():
        first = _outcome(attempt, dict(values))
        paths = [path for path in _whole_numbers(values) if _value(values, path) != 1]
        end = time.monotonic() + _LONGEST
        outcomes: dict[_Path, tuple[str, str] | None] = {}
        for group in ([path for path in paths if _value(values, path) in likely], paths):
            is_likely = group is not paths
            for path in group:
                if first is not None and path not in outcomes and time.monotonic() < end:
                    outcomes[path] = _outcome(attempt, _with(values, path, 1))
            alone = [path for path, outcome in outcomes.items() if outcome is None]
            if alone:
                return Blame(tuple(_shown(values, path) for path in alone)) if len(alone) <= _MOST else Blame()
            for one, other in combinations(outcomes, 2):
                if not is_likely and outcomes[one] == outcomes[other] == first:
                    continue
                both = _with(_with(values, one, 1), other, 1)
                if time.monotonic() < end and _outcome(attempt, both) is None:
                    return Blame((_shown(values, one), _shown(values, other)), together=True)
    return Blame()


def _whole_numbers(values: Mapping[str, Any]) -> Iterator[_Path]:
    for path in _paths(values):
        if isinstance(_value(values, path), int) and not isinstance(_value(values, path), bool):
            yield path


def _with(values: Mapping[str, Any], path: _Path, value: object) -> dict[str, Any]:
    """`values` with another one at `path`."""
    changed = copy.deepcopy(dict(values))
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return changed


def _pairs(
    values: Mapping[str, Any], attempt: Attempt, firsts: list[_Path], end: float
) -> Iterator[tuple[_Path, _Path]]:
    """Two fields that are both to blame; without one of `firsts` alone, something else is raised."""
    for one in firsts:
        for changed in _changes(values, one):
            for path in _paths(changed):
                if time.monotonic() > end:
                    return
                if path not in (one, one[: len(path)]) and any(
                    _outcome(attempt, both) is None for both in _changes(changed, path)
                ):
                    yield one, path


def _changes(values: Mapping[str, Any], path: _Path) -> Iterator[dict[str, Any]]:
    """`values` without the field at `path`, and with a 1 there if it is a number or null."""
    for value in (None, 1):
        changed = copy.deepcopy(dict(values))
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        if value is None:
            del holder[path[-1]]
        elif isinstance(holder[path[-1]], int | float | None) and not isinstance(holder[path[-1]], bool):
            holder[path[-1]] = value
        else:
            return
        yield changed


def _outcome(attempt: Attempt, values: dict[str, Any]) -> tuple[str, str] | None:
    """None where it can be done, else what was raised."""
    try:
        attempt(copy.deepcopy(values))
    except Exception as error:  # whatever a constructor raises
        return type(error).__name__, str(error)
    return None


def _is_no_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value <= 0


def _value(values: Mapping[str, Any], path: _Path) -> Any:
    found: Any = values
    for key in path:
        found = found[key]
    return found


def _paths(values: Mapping[str, Any], above: _Path = ()) -> Iterator[_Path]:
    """Every field, what is within a field before it."""
    for key, value in values.items():
        if key in _IDENTITY:
            continue
        if isinstance(value, Mapping):
            yield from _paths(value, (*above, key))
        yield (*above, key)


def _shown(values: Mapping[str, Any], path: _Path) -> str:
    text = json.dumps(_value(values, path), default=str)
    field = f'"{".".join(path)}": {text if len(text) <= _SHOWN else text[: _SHOWN - 2] + " …"}'
    return field if len(path) == 1 else f"{field}, or what goes with it,"


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What libraries log and warn of while things are tried is of no concern."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
