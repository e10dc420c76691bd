"""Checkpoint names and module names: the same tensor with and without the base model's prefix.

In: the names that the plan knows. Out: for a name in a checkpoint, the planned name, or None.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol


class Renaming(Protocol):
    """One of transformers' renamings of checkpoint tensors (`transformers.core_model_loading.WeightRenaming`)."""

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The new name, and the pattern that matched or None."""
        ...


def renamed(name: str, renamings: Iterable[Renaming]) -> str:
    """The name after every renaming that matches, in order, as transformers applies them when it loads."""
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def planned_name(name: str, known: Collection[str], base_prefix: str) -> str | None:
    """The name in `known` that the checkpoint's `name` stands for.

    A checkpoint of the head model holds full names; one of a bare decoder leaves out its prefix, or the outer part of it
    (``decoder.layers.0...`` for ``model.decoder.layers.0...``).
    """
    if name in known:
        return name
    parts = base_prefix.split(".") if base_prefix else []
    candidates = (".".join([*parts[: end + 1], name]) for end in reversed(range(len(parts))))
    return next((candidate for candidate in candidates if candidate in known), None)
