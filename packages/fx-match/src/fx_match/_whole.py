"""Patterns about more than one expression: a whole forward, several expressions together, and what is not there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from fx_match._errors import PatternError
from fx_match._find import find, returned, whole_reason
from fx_match._pattern import Pattern
from fx_match._state import Run, State
from fx_match._subject import Subject, SubjectLike


@dataclass(frozen=True, slots=True)
class _Whole(Pattern):
    pattern: Pattern

    def match(self, value: Any, state: State, run: Run) -> Iterator[State]:
        if run.subject.complete and returned(run.subject) is not value:
            run.fail(state, value, f"{value} is not what the forward returns")
            return
        for matched in self.pattern.match(value, state, run):
            problem = whole_reason(run.subject, value, set(matched.covered))
            if problem is None:
                yield matched
            else:
                run.fail(matched, *problem)


def whole(pattern: Pattern) -> Pattern:
    """Match only if the forward is exactly `pattern`: it returns the root alone, and computes nothing else."""
    return _Whole(pattern)


@dataclass(frozen=True, slots=True)
class _Together(Pattern):
    patterns: tuple[Pattern, ...]

    def match(self, value: Any, state: State, run: Run) -> Iterator[State]:
        for matched in self.patterns[0].match(value, state, run):
            yield from self._rest(self.patterns[1:], (value,), matched, run)

    def _rest(self, patterns: tuple[Pattern, ...], roots: tuple[Any, ...], state: State, run: Run) -> Iterator[State]:
        if not patterns:
            yield state
            return
        for node in run.subject.graph.nodes:
            if node not in roots:
                for matched in patterns[0].match(node, state, run):
                    yield from self._rest(patterns[1:], (*roots, node), matched, run)


def together(*patterns: Pattern) -> Pattern:
    """Several expressions in one graph, with different roots and common captures; the first is the match's root.

    `together(*(linear(name)(any_value("x")) for name in ("q", "k", "v")))` is three linears on the same input, named in
    the order in which they are made.
    """
    if len(patterns) < 2:
        raise PatternError("together() needs at least two patterns")
    return _Together(patterns)


@dataclass(frozen=True, slots=True)
class Absent:
    """The claim that a pattern is nowhere in the graph. On a partial trace, what was not seen may still follow."""

    pattern: Pattern

    def check(self, subject: SubjectLike) -> Literal["absent", "present", "unknown"]:
        subject = Subject.of(subject)
        if find(self.pattern, subject):
            return "present"
        return "absent" if subject.complete else "unknown"

    def __call__(self, value: object, subject: Subject) -> bool | str:
        """For `Pattern.where`: true only if the pattern is known to be absent."""
        answer = self.check(subject)
        if answer == "unknown":
            return "the trace is partial: what should be absent may follow"
        return answer == "absent" or "something that should be absent is present"


def absent(pattern: Pattern) -> Absent:
    """The claim that `pattern` matches nowhere: `.check(subject)` says "absent", "present" or "unknown"."""
    return Absent(pattern)
