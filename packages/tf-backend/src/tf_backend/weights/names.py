"""Checkpoint names and module names: the same tensor with and without the base model's prefix.

In: the names that the plan knows. Out: for a name in a checkpoint, the planned name, or None.
"""

from __future__ import annotations

from collections.abc import Collection


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
