"""Our uses against one surface, and the ledgers against our uses.

In: uses, a surface, ledgers. Out: `Problem`s, each with what is wrong and what to do; none means that the contract holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tf_tools.contract import _ledger
from tf_tools.contract._claims import CLAIMS, Claim, claim_problems
from tf_tools.contract._collect import Uses
from tf_tools.contract._data import CallShape, Definition, Entry, Place, Surface, Use, private_part
from tf_tools.contract._options import NAMESPACE
from tf_tools.contract._signature import misfit

RECORD = "python -m tf_tools.contract record --wheel VERSION"
_TYPE_IT = "say what it is in _typed.py"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that a build lacks, or that a ledger does not know. `source` is the build, or ``our source``."""

    source: str
    path: str
    what: str
    places: tuple[Place, ...] = ()

    def __str__(self) -> str:
        places = f" ({', '.join(map(str, self.places))})" if self.places else ""
        return f"{self.source}: {self.path}: {self.what}{places}"


def check_surface(uses: Iterable[Use], surface: Surface) -> tuple[Problem, ...]:
    """Every use that `surface` cannot serve: missing, of unknown type, called in a way that does not fit, or not recorded."""
    found: dict[tuple[str, str], list[Place]] = {}
    absent: dict[str, Place] = {}
    for use in uses:
        if use.kind == "untyped":
            continue  # a problem of our source, whatever the build
        if use.path not in surface.entries:
            absent.setdefault(use.path, use.place)
            continue
        for what in _use_problems(use, surface.entries[use.path], surface):
            found.setdefault((use.path, what), []).append(use.place)
    problems = [Problem(surface.source, path, what, tuple(places)) for (path, what), places in found.items()]
    if absent:  # together: one command mends them all
        problems.append(Problem(surface.source, ", ".join(absent), _unrecorded(surface), tuple(absent.values())))
    return tuple(problems)


def _unrecorded(surface: Surface) -> str:
    return f"not in the record; record it again: {RECORD.replace('VERSION', surface.source.split()[-1])}"


def _use_problems(use: Use, entry: Entry, surface: Surface) -> Iterator[str]:
    if not entry.definitions:
        yield entry.missing
    elif all(one.kind == "unknown" for one in entry.definitions):
        yield f"its type cannot be told: {entry.definitions[0].where}; {_TYPE_IT}"
    elif use.call is not None:
        what = _call_problem(_without_passed_on(use.path, use.call), entry.definitions)
        if what is not None:
            yield f"a call {use.call} does not fit: {what}" if what else f"its signature is {_unrecorded(surface)}"


def _without_passed_on(path: str, call: CallShape) -> CallShape:
    """`call` without the keywords that the ledger knows to be passed on through ``**``."""
    known = _ledger.PASSED_ON.get(path, frozenset())
    return dataclasses.replace(
        call,
        keywords=tuple(name for name in call.keywords if name not in known),
        sometimes=tuple(name for name in call.sometimes if name not in known),
    )


def _call_problem(call: CallShape, definitions: tuple[Definition, ...]) -> str | None:
    """Why no alternative takes `call`; empty when none has a signature that should have one; None when one takes it."""
    reasons = []
    for one in definitions:
        if one.signature is None:
            if one.kind == "outside" or one.bases or one.kind == "class":
                return None  # another library's to say
            reasons.append("")
        else:
            reason = misfit(call, one.signature)
            if reason is None:
                return None
            reasons.append(reason)
    return next((reason for reason in reasons if reason), "")


def check_claims(surface: Surface, packages: Path, claims: Iterable[Claim] = CLAIMS) -> tuple[Problem, ...]:
    """Where our own data and classes repeat something of vLLM that is not so in `surface`."""
    found = []
    for claim in claims:
        entry = surface.entries.get(claim.path)
        if entry is None:
            found.append(Problem(surface.source, claim.path, _unrecorded(surface)))
        elif not entry.definitions:
            found.append(Problem(surface.source, claim.path, entry.missing))
        else:
            found += [Problem(surface.source, claim.path, what) for what in claim_problems(claim, entry, packages)]
    return tuple(dict.fromkeys(found))


def check_ledgers(uses: Uses, surface: Surface) -> tuple[Problem, ...]:
    """Private names, derived classes, writes and patches that no ledger knows, layers that are derived from, rows that nothing needs.

    `surface` says which classes are layers.
    """
    found: dict[tuple[str, str], list[Place]] = {}
    needed: set[str] = set()
    for use in uses.uses:
        for path, ledger, what in _rules(use, surface):
            needed.add(path)
            if path not in ledger:
                found.setdefault((path, what), []).append(use.place)
    problems = [Problem("our source", path, what, tuple(places)) for (path, what), places in found.items()]
    patches = [patch.path for patch in _ledger.PATCHES]
    for path in (*_ledger.PRIVATE, *_ledger.DERIVED, *_ledger.WRITTEN, *_ledger.DYNAMIC, *patches):
        if path not in needed:
            problems.append(Problem("our source", path, "an entry of _ledger.py that nothing uses any more; remove it"))
    for row in uses.stale:
        what = f"a row of _typed.py that nothing matches any more: `{row.expression}` in {row.scope} of {row.file}"
        problems.append(Problem("our source", row.path or row.expression, what))
    return tuple(problems)


def _rules(use: Use, surface: Surface) -> Iterator[tuple[str, Iterable[str], str]]:
    if use.kind == "untyped":
        yield use.path, (), f"nothing says of which type this is; {_TYPE_IT}, or annotate it"
        return
    private = private_part(use.path)
    if private is not None:
        yield private, _ledger.PRIVATE, "private; give the reason in PRIVATE of _ledger.py, or do without"
    if use.kind == "subclass":
        bases = {base for one in surface.entries.get(use.path, Entry()).definitions for base in one.bases}
        if bases & {"torch.nn.Module", "torch.nn.modules.module.Module"}:
            yield use.path, (), "a layer of vLLM, from which nothing of ours may derive: wrap it"
        else:
            yield use.path, _ledger.DERIVED, "derived from; give the reason in DERIVED of _ledger.py, or do without"
    elif use.kind == "write" and use.path.startswith(NAMESPACE):
        return  # the parsed options are ours
    elif use.kind == "write" and "()" in use.path:
        yield use.path, _ledger.WRITTEN, "written to; give the reason in WRITTEN of _ledger.py, or do without"
    elif use.kind == "write":
        patches = [patch.path for patch in _ledger.PATCHES]
        yield (
            use.path,
            patches,
            "changed for the whole process, which is a patch; enter it in PATCHES of _ledger.py, or do without",
        )
    elif use.kind == "dynamic":
        yield use.path, _ledger.DYNAMIC, "read by a name that is not literal; give the reason in DYNAMIC of _ledger.py"
