"""Checkpoint names and names in the model: which tensor of the model a stored one is, or is a part of.

In: how transformers reads checkpoints of the model. Out: for each stored name its place, as transformers finds it when it loads: renamed,
with the decoder's prefix added or taken away, and with the converter that reads it where values or the layout change on the way.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from tf_backend.weights.conversion import Conversion

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightConverter, WeightRenaming


class Place(NamedTuple):
    """What a stored tensor is in the model.

    name: of the model's tensor, or of the stored one, renamed, where the model has none.
    pattern: of the converter that reads the stored tensor; None when it is the model's tensor as it stands.
    """

    name: str
    pattern: str | None = None


class Names:
    """The places of the names of one checkpoint.

    `stored` holds all its names, where they are known before its tensors are read, and is None where they are not.
    """

    def __init__(self, conversion: Conversion, stored: Iterable[str] | None = None) -> None:
        self.conversion = conversion
        self.stored = None if stored is None else frozenset(stored)
        self._shapes = dict(conversion.shapes)
        self._places: dict[str, Place] = {}
        # A copy: a transform may remember which names it has met, so that others of the same checkpoint are renamed or left.
        transforms: list[Any] = list(copy.deepcopy(conversion.transforms))
        self._converters: list[WeightConverter] = [one for one in transforms if hasattr(one, "operations")]
        self._renamings: list[WeightRenaming] = [one for one in transforms if not hasattr(one, "operations")]
        self.converter_of = {pattern: one for one in self._converters for pattern in one.source_patterns}
        for name in natural_order(self.stored or ()):
            self.place(name)

    def place(self, name: str) -> Place:
        """What the stored tensor `name` is."""
        known = self._places.get(name)
        if known is None:
            known = self._places[name] = self._find(name)
        return known

    def is_stacked(self, place: Place) -> bool:
        """Whether the converter of `place` begins by stacking tensors that differ in an index, which must be of one shape."""
        from transformers.core_model_loading import MergeModulelist

        converter = None if place.pattern is None else self.converter_of[place.pattern]
        return converter is not None and isinstance(next(iter(converter.operations), None), MergeModulelist)

    def parts_of(self, target: str) -> frozenset[str] | None:
        """All stored names that a converter makes `target` of; None where the names of the checkpoint are not known."""
        return None if self.stored is None else self._parts.get(target, frozenset())

    @functools.cached_property
    def saved(self) -> Names:
        """The names of a checkpoint of this model as transformers saves one today; of none where it cannot reverse its mapping."""
        return Names(self.conversion, self.conversion.stored_names)

    def renamed(self, name: str) -> str:
        """A stored name as it is called today, without the decoder's prefix and before any converter: the same for every spelling."""
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name.removeprefix(f"{self.conversion.base}.")

    @functools.cached_property
    def _parts(self) -> dict[str, frozenset[str]]:
        groups: dict[str, set[str]] = {}
        for name in self.stored or ():
            place = self.place(name)
            if place.pattern is not None:
                groups.setdefault(place.name, set()).add(name)
        return {target: frozenset(names) for target, names in groups.items()}

    def _find(self, name: str) -> Place:
        # In the order of transformers: a name that the model has may still be renamed, to another one that it has.
        renamed, pattern = self._rename(name, self._renamings, self._converters)
        if renamed not in self._shapes and name in self._shapes:
            renamed, pattern = self._rename(name, [], [])
        found = planned_name(renamed, self._shapes, self.conversion.base)
        if found is None:  # a name of the model without its prefix, which a renaming takes for an old one
            plain, _ = self._rename(name, [], [])
            found = planned_name(plain, self._shapes, self.conversion.base)
            pattern = pattern if found is None else None
        return Place(found or renamed, pattern)

    def _rename(
        self, name: str, renamings: list[WeightRenaming], converters: list[WeightConverter]
    ) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        prefix = self.conversion.base_prefix or None
        found: tuple[str, str | None] = rename_source_key(name, renamings, converters, prefix, self._shapes)
        return found


def natural_order(names: Iterable[str]) -> list[str]:
    """Sorted with numbers as numbers, as transformers sorts a checkpoint: ``experts.2`` before ``experts.10``."""
    from transformers.core_model_loading import dot_natural_key

    return sorted(names, key=dot_natural_key)


def planned_name(name: str, known: Collection[str], base: str) -> str | None:
    """The name in `known` that the checkpoint's `name` stands for.

    A checkpoint of the head model holds full names; one of a bare decoder leaves out its prefix, or the outer part of it
    (``decoder.layers.0...`` for ``model.decoder.layers.0...``).
    """
    if name in known:
        return name
    parts = base.split(".") if base else []
    candidates = (".".join([*parts[: end + 1], name]) for end in reversed(range(len(parts))))
    return next((candidate for candidate in candidates if candidate in known), None)
