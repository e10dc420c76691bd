"""The level `serve`: the engine against transformers, by an oracle that another package brings.

In: an entry, an oracle. Out: a `Verdict`. This package serves models and does not judge itself: what compares is installed beside it, under
the entry-point group `tf_backend.zoo` by the name `oracle`, as the development environment does.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, cast

from transformers import PreTrainedModel

from tf_backend.errors import OptionRefused
from tf_backend.zoo.plan_level import NotBuildable, small_skeleton
from tf_backend.zoo.rows import Verdict
from tf_backend.zoo.types import Entry

GROUP = "tf_backend.zoo"


class Oracle(Protocol):
    """Serves a tiny model in the engine and holds it against transformers."""

    def prepare(self) -> None:
        """Import the engine into this process, from which others are forked."""

    def judge(self, skeleton: PreTrainedModel, folder: Path) -> tuple[str, str, int, float]:
        """Write a checkpoint like `skeleton` (on meta) into `folder`, serve it, compare.

        Returns:
            "equal", "wrong" or "failed" (the engine raised or died); what was found, in one line; positions compared; the largest
            difference of a log-probability.
        """


def oracle() -> Oracle:
    """The installed oracle, prepared.

    Raises:
        OptionRefused: there is none.
    """
    found = [point for point in entry_points(group=GROUP) if point.name == "oracle"]
    if not found:
        raise OptionRefused(
            "--level serve needs an oracle that compares the engine with transformers: run it in a checkout, where `uv sync` "
            "installs one. The levels plan and numbers need none."
        )
    loaded = cast(Oracle, cast(Any, found[0].load()))
    loaded.prepare()
    return loaded


def serve_verdict(judge: Oracle, entry: Entry) -> Verdict:
    """Serve the tiny model of `entry` and compare."""
    try:
        skeleton = small_skeleton(entry)
    except NotBuildable as error:
        return Verdict("skipped", str(error))
    with tempfile.TemporaryDirectory(prefix="tf-backend-zoo-") as folder:
        status, found, positions, worst = judge.judge(skeleton, Path(folder) / "model")
    if status == "equal":
        return Verdict("equal", "", positions, worst)
    return Verdict("wrong" if status == "wrong" else "failed", found, positions, worst)
