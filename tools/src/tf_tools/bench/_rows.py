"""Rows: what one process measured, or how it failed; as data and as JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PHASES = ("all", "prefill", "decode")
CLOCKS = ("cpu", "wall")


@dataclass(frozen=True, slots=True)
class Measure:
    """One workload in one process; each tuple has one entry per repeat, in seconds.

    The prefill ends with the step that gives the last request its first token, which is also the time to first token;
    the decode is what follows. CPU time is that of all threads of the process.

    Attributes:
        input_tokens, output_tokens: of all requests together.
        decode_tokens: of the output, those that came after the prefill.
    """

    concurrency: int
    input_tokens: int
    output_tokens: int
    decode_tokens: int
    prefill_wall: tuple[float, ...] = ()
    prefill_cpu: tuple[float, ...] = ()
    decode_wall: tuple[float, ...] = ()
    decode_cpu: tuple[float, ...] = ()

    def seconds(self, phase: str, clock: str) -> float | None:
        """Median over the repeats; None where there is nothing: no repeat, or no decode."""
        runs = self.runs(phase, clock)
        return statistics.median(runs) if runs else None

    def runs(self, phase: str, clock: str) -> tuple[float, ...]:
        """Seconds of each repeat, in their order; none where there is no repeat, or no decode."""
        prefill = self.prefill_cpu if clock == "cpu" else self.prefill_wall
        decode = self.decode_cpu if clock == "cpu" else self.decode_wall
        if not self.tokens(phase):
            return ()
        if phase == "all":
            return tuple(a + b for a, b in zip(prefill, decode, strict=True))
        return prefill if phase == "prefill" else decode

    def tokens(self, phase: str) -> int:
        """What a phase is counted in: input tokens for the prefill, generated ones otherwise."""
        return {"all": self.output_tokens, "prefill": self.input_tokens, "decode": self.decode_tokens}[phase]


@dataclass(frozen=True, slots=True)
class Finished:
    """What a process brings home. Seconds and bytes.

    Attributes:
        served_by: "module.Class" of the loaded model.
        import_wall, import_cpu: until vLLM's classes are imported.
        load_wall, load_cpu: building the engine; CPU with that of child processes which ended meanwhile.
        loaded_rss, peak_rss: largest resident size when the engine was built, and at the end.
    """

    served_by: str
    import_wall: float
    import_cpu: float
    load_wall: float
    load_cpu: float
    loaded_rss: int
    peak_rss: int
    measures: tuple[Measure, ...]

    def measure(self, concurrency: int) -> Measure | None:
        return next((m for m in self.measures if m.concurrency == concurrency), None)


@dataclass(frozen=True, slots=True)
class Row:
    """One process.

    Attributes:
        attempt: rows of one pair belong together only when this is equal.
        load_average: of the last minute when it started; a process of this measurement counts one.
        seconds: wall, from start to end.
        failure: "" or why there is no result.
        result: None exactly when there is a failure.
    """

    mode: str
    pair: int
    attempt: int
    arm: str
    position: int
    cores: tuple[int, ...]
    load_average: float
    seconds: float
    failure: str
    result: Finished | None

    @property
    def ok(self) -> bool:
        return self.result is not None


def to_json(row: Row) -> dict[str, Any]:
    return dataclasses.asdict(row)


def from_json(data: Mapping[str, Any]) -> Row:
    """Raises `KeyError` or `TypeError` for what is no row."""
    fields = dict(data)
    result = fields.pop("result")
    return Row(
        **{**fields, "cores": tuple(fields["cores"])}, result=None if result is None else finished_from_json(result)
    )


def finished_from_json(data: Mapping[str, Any]) -> Finished:
    fields = dict(data)
    measures = tuple(map(_measure_from_json, fields.pop("measures")))
    return Finished(**fields, measures=measures)


def _measure_from_json(data: Mapping[str, Any]) -> Measure:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    return Measure(**fields)
