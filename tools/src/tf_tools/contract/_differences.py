"""What changed between two builds at the paths that we use.

In: two surfaces. Out: `Difference`s. None of them is a fault by itself: faults are what `check_surface` finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tf_tools.contract._data import Definition, Signature, Surface

What = Literal["moved", "type", "signature", "source", "names"]


@dataclass(frozen=True, slots=True)
class Difference:
    """At `path`: a signature or type that reads differently, a definition that moved, or the source of something that we call."""

    path: str
    what: What
    text: str


def differences(old: Surface, new: Surface) -> tuple[Difference, ...]:
    """Of the paths that both have, in order; one row for each definition, however many paths lead to it."""
    found: dict[tuple[str, str], Difference] = {}
    for path in sorted(old.entries.keys() & new.entries.keys()):
        before = {one.where: one for one in old.entries[path].definitions}
        after = {one.where: one for one in new.entries[path].definitions}
        if before and after and before.keys() != after.keys():
            text = f"{', '.join(sorted(before))} -> {', '.join(sorted(after))}"
            found[(path, "moved")] = Difference(path, "moved", text)
        for where in sorted(before.keys() & after.keys()):
            for what, text in _compare(before[where], after[where]):
                found.setdefault((where, what), Difference(path, what, text))
    return tuple(found.values())


def _compare(old: Definition, new: Definition) -> Iterator[tuple[What, str]]:
    if old.annotation != new.annotation:
        yield "type", f"{old.annotation or 'none'} -> {new.annotation or 'none'}"
    if old.signature is not None and new.signature is not None and old.signature != new.signature:
        yield "signature", _signature_text(old.signature, new.signature)
    if old.body and new.body and old.body != new.body:
        yield "source", "its source changed: read it again"
    if isinstance(old.value, dict) and isinstance(new.value, dict) and old.value != new.value:
        yield "names", _names_text(set(map(str, old.value)), set(map(str, new.value)))
    if old.members is not None and new.members is not None and old.members != new.members:
        yield "names", _names_text(set(old.members), set(new.members))


def _signature_text(old: Signature, new: Signature) -> str:
    before, after = {one.name: one for one in old}, {one.name: one for one in new}
    parts = [f"-{before[name]}" for name in before if name not in after]
    parts += [f"+{after[name]}" for name in after if name not in before]
    parts += [f"{before[name]} -> {after[name]}" for name in before if name in after and before[name] != after[name]]
    shared = [name for name in before if name in after]
    if shared != [name for name in after if name in before]:
        parts.append("another order")
    return "; ".join(parts)


def _names_text(old: set[str], new: set[str]) -> str:
    parts = [f"-{name}" for name in sorted(old - new)] + [f"+{name}" for name in sorted(new - old)]
    return " ".join(parts) or "the same names, which mean something else"
