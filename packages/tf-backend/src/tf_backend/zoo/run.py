"""Find out what is asked, level by level, and keep it; then make rows of all that is known.

In: entries, levels, a results file. Out: rows. Nothing that a model does ends the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import msgspec

from tf_backend.capabilities import Capabilities
from tf_backend.zoo.forks import Outcome, run_forked
from tf_backend.zoo.results import Results
from tf_backend.zoo.rows import LEVELS, Level, PlanFacts, Row, Verdict, make_row
from tf_backend.zoo.types import Entry

TIME_LIMITS: dict[Level, float] = {"plan": 60.0, "numbers": 120.0, "serve": 300.0}
"""Seconds for one type, by level."""


class Watch(Protocol):
    """Told what goes on: a progress bar, or nothing."""

    def begin(self, level: Level, total: int) -> None: ...
    def done(self, name: str, status: str) -> None: ...


class Silent:
    """Watches nothing."""

    def begin(self, level: Level, total: int) -> None:
        """Nothing."""

    def done(self, name: str, status: str) -> None:
        """Nothing."""


def levels_up_to(level: Level) -> tuple[Level, ...]:
    """``numbers`` needs ``plan``, and so on."""
    return LEVELS[: LEVELS.index(level) + 1]


def find_out(
    entries: Sequence[Entry],
    levels: Sequence[Level],
    results: Results,
    capabilities: Capabilities,
    *,
    at_once: int | None = None,
    timeout: float | None = None,
    watch: Watch | None = None,
) -> tuple[Row, ...]:
    """Rows for `entries`; what `results` holds is not done again.

    Args:
        at_once: jobs side by side; as many as cores when None. The level `serve` runs one at a time.
        timeout: seconds for one type at one level; `TIME_LIMITS` when None.
    """
    watch = watch or Silent()
    cores = len(os.sched_getaffinity(0))
    for level in levels:
        missing = [entry for entry in entries if _is_wanted(entry, level, results)]
        watch.begin(level, len(missing))
        if not missing:
            continue
        job = _prepared(level, capabilities)
        side_by_side = 1 if level == "serve" else at_once or cores
        limit = timeout or TIME_LIMITS[level]
        for together in (_by_type(missing), [[entry] for entry in missing]):
            # Roles of one type share an import. Where a process that looks at several ends badly, each has one of its own.
            groups = {group[0].name: group for group in together if _is_wanted(group[-1], level, results)}
            jobs = ((name, partial(_encoded, job, group)) for name, group in groups.items())
            for outcome in run_forked(jobs, at_once=side_by_side, timeout=limit):
                group = groups[outcome.name]
                if outcome.failure and len(group) > 1:
                    continue
                for entry, found in zip(group, _decoded(outcome, level), strict=True):
                    results.add(entry.name, level, found, outcome.seconds / len(group))
                    watch.done(entry.name, found.status)
    return tuple(rows(entries, results))


def _by_type(entries: Sequence[Entry]) -> list[list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.model_type, []).append(entry)
    return list(groups.values())


def rows(entries: Sequence[Entry], results: Results) -> Iterator[Row]:
    """A row for each entry that was planned."""
    for entry in entries:
        facts = results.get(entry.name, "plan", PlanFacts)
        if facts is not None:
            numbers, serve = (results.get(entry.name, level, Verdict) for level in LEVELS[1:])
            yield make_row(entry.name, entry.architecture, facts, numbers, serve)


def _is_wanted(entry: Entry, level: Level, results: Results) -> bool:
    if results.get(entry.name, level, Verdict if level != "plan" else PlanFacts) is not None:  # type: ignore[type-var]
        return False
    if level == "plan":
        return True
    facts = results.get(entry.name, "plan", PlanFacts)
    if facts is None:
        return False
    return facts.status == "served" if level == "serve" else bool(facts.fusions)


def _prepared(level: Level, capabilities: Capabilities) -> Callable[[Entry], PlanFacts | Verdict]:
    """The job of a level, with everything imported that each child would import again."""
    import torch

    torch.set_num_threads(1)  # an OpenMP pool would not survive the fork
    if level == "plan":
        from tf_backend.plan import planner  # noqa: F401
        from tf_backend.zoo.plan_level import plan_facts

        return partial(plan_facts, capabilities=capabilities)
    if level == "numbers":
        from tf_backend.zoo.numbers_level import numbers_verdict

        return partial(numbers_verdict, capabilities=capabilities)
    from tf_backend.zoo.serve_level import oracle, serve_verdict

    return partial(serve_verdict, oracle())


def _encoded(job: Callable[[Entry], PlanFacts | Verdict], entries: Sequence[Entry]) -> bytes:
    return msgspec.json.encode([job(entry) for entry in entries])


def _decoded(outcome: Outcome, level: Level) -> Sequence[PlanFacts | Verdict]:
    """What a job found for each entry; of one entry, how it failed."""
    if level == "plan":
        if outcome.failure:
            return [PlanFacts("failed", outcome.failure)]
        return msgspec.json.decode(outcome.value, type=list[PlanFacts])
    if outcome.failure:
        return [Verdict("failed", outcome.failure)]
    return msgspec.json.decode(outcome.value, type=list[Verdict])
