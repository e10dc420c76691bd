"""What is known of one model type: facts of each level, and the row that they make.

In: outcomes. Out: msgspec structs, one line of JSON each.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Level: TypeAlias = Literal["plan", "numbers", "serve"]
LEVELS: tuple[Level, ...] = ("plan", "numbers", "serve")

Status: TypeAlias = Literal["equal", "served", "refused", "wrong", "not buildable", "failed"]
STATUSES: dict[Status, str] = {
    "equal": "served, and held against transformers in the engine: equal",
    "served": "planned, and nothing stands against serving it",
    "refused": "would not be served; the reason says what stands against it",
    "wrong": "numbers differ from transformers: a defect",
    "not buildable": "no tiny model can be made of its default config here",
    "failed": "looking at it crashed, or took longer than the time limit: a defect",
}


class PlanFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What planning says, on one rank and on two.

    `fusions`: name -> modules that it was applied to. `misses`: class, fusion, reason and line. `tensor_2`: how two ranks share the work.
    """

    status: Literal["served", "refused", "not buildable", "failed"]
    reason: str = ""
    fusions: dict[str, int] = {}
    misses: tuple[str, ...] = ()
    tensor_2: str = ""


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one comparison of numbers says. `compared`: variants, or positions. `worst`: the largest difference met."""

    status: Literal["equal", "wrong", "skipped", "failed"]
    reason: str = ""
    compared: int = 0
    worst: float = 0.0


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model type: `level` is the highest at which something was found out."""

    name: str
    architecture: str
    status: Status
    level: Level
    reason: str = ""
    fusions: dict[str, int] = {}
    misses: tuple[str, ...] = ()
    tensor_2: str = ""
    numbers: str = ""
    serve: str = ""

    @property
    def kind(self) -> str:
        """Key of `KINDS`."""
        return self.name.partition("/")[0]

    @property
    def model_type(self) -> str:
        """As in a config."""
        return self.name.partition("/")[2]


def make_row(
    name: str, architecture: str, plan: PlanFacts, numbers: Verdict | None = None, serve: Verdict | None = None
) -> Row:
    """One row of all that is known; the worst news decides its status."""
    status: Status = plan.status
    level: Level = "plan"
    reason = plan.reason
    for at, verdict in (("numbers", numbers), ("serve", serve)):
        if verdict is None or verdict.status == "skipped":
            continue
        level = "numbers" if at == "numbers" else "serve"
        if verdict.status in ("wrong", "failed"):
            status, reason = verdict.status, f"{at}: {verdict.reason}"
            break
        if at == "serve":
            status = "equal"
    return Row(
        name,
        architecture,
        status,
        level,
        reason,
        dict(sorted(plan.fusions.items())),
        plan.misses,
        plan.tensor_2,
        _said(numbers, "variants"),
        _said(serve, "positions"),
    )


def _said(verdict: Verdict | None, unit: str) -> str:
    """Nothing that differs from machine to machine."""
    if verdict is None:
        return ""
    if verdict.status == "equal":
        return f"equal ({verdict.compared} {unit})"
    return f"{verdict.status}: {verdict.reason}" if verdict.reason else verdict.status
