"""Checkpoint names and module names: the same tensor with and without the base model's prefix.

In: the names that the plan knows. Out: for a name in a checkpoint, the planned name, or None.
"""

from __future__ import annotations

from collections.abc import Collection


def planned_name(name: str, known: Collection[str], base_prefix: str) -> str | None:
    """The name in `known` that the checkpoint's `name` stands for.

    A checkpoint of the bare decoder has no prefix (``layers.0...`` for ``model.layers.0...``); one of the head model has it.
    """
    if name in known:
        return name
    if base_prefix and f"{base_prefix}.{name}" in known:
        return f"{base_prefix}.{name}"
    if base_prefix and name.startswith(f"{base_prefix}."):
        bare = name[len(base_prefix) + 1 :]
        if bare in known:
            return bare
    return None
