"""The model types of the installed transformers, by kind, with the class that is planned for each.

In: nothing. Out: `Entry` objects, sorted. Read from transformers' own tables; nothing is imported but those.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from functools import cache

import msgspec

from tf_backend.errors import OptionRefused
from tf_backend.spelling import meant_by

KINDS: dict[str, tuple[str, ...]] = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    "encoder": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",),
    "embedding": ("MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES", "MODEL_FOR_RETRIEVAL_MAPPING_NAMES"),
    "classification": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",),
    "image-text": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",),
}
"""Kind -> tables of transformers that say which class each model type has for it."""


class Entry(msgspec.Struct, frozen=True, order=True):
    """One model type in one role. `name` is what filters and rows go by."""

    kind: str
    model_type: str
    architecture: str

    @property
    def name(self) -> str:
        """``causal/llama``."""
        return f"{self.kind}/{self.model_type}"


@cache
def entries() -> tuple[Entry, ...]:
    """Every model type of every kind, in the order of `KINDS`, then by name."""
    from transformers.models.auto import modeling_auto

    found: list[Entry] = []
    for kind, tables in KINDS.items():
        classes: dict[str, str] = {}
        for table in tables:
            for model_type, names in dict(getattr(modeling_auto, table)).items():
                classes.setdefault(model_type, names if isinstance(names, str) else names[0])
        found += [Entry(kind, model_type, architecture) for model_type, architecture in sorted(classes.items())]
    return tuple(found)


def select(names: Sequence[str] = (), kinds: Sequence[str] = ()) -> tuple[Entry, ...]:
    """The entries that `names` and `kinds` leave; all when both are empty.

    Args:
        names: model types, or `kind/type`, each possibly with the wildcards of a shell.
        kinds: keys of `KINDS`.

    Raises:
        OptionRefused: a name or kind that fits nothing.
    """
    wrong = [kind for kind in kinds if kind not in KINDS]
    if wrong:
        raise OptionRefused(f"there is no kind `{wrong[0]}`; there are {', '.join(KINDS)}.")
    within = [entry for entry in entries() if not kinds or entry.kind in kinds]
    if not names:
        return tuple(within)
    chosen: set[Entry] = set()
    for name in names:
        fitting = [e for e in within if fnmatch.fnmatchcase(e.name if "/" in name else e.model_type, name)]
        if not fitting:
            raise OptionRefused(_unknown(name, within, kinds))
        chosen.update(fitting)
    return tuple(entry for entry in within if entry in chosen)


def _unknown(name: str, within: Sequence[Entry], kinds: Sequence[str]) -> str:
    from importlib import metadata

    known = sorted({entry.name if "/" in name else entry.model_type for entry in within})
    near = meant_by(name, known)
    among = f" of kind {' or '.join(kinds)}" if kinds else ""
    hint = f" (is `{near}` meant?)" if near else ""
    return f"transformers {metadata.version('transformers')} has no model type `{name}`{among}{hint}."
