"""Refusals that are no fault of the model's: a size in its config.json is zero or below.

In: a model that is refused, and how to plan another. Out: its refusals, or one of them with the field to correct.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from transformers import PreTrainedModel

from tf_backend.model.blame import find_size_to_blame
from tf_backend.model.config import config_file, read_values
from tf_backend.model.skeleton import build
from tf_backend.plan.schema import Refusal


def blame_sizes(
    model: PreTrainedModel, refusals: Sequence[Refusal], refusals_of: Callable[[PreTrainedModel], Sequence[Refusal]]
) -> tuple[Refusal, ...]:
    """`refusals` of `model`; where another value of one number in its config.json leaves none of them, the first, with that remedy.

    A window of -1 reads as a mask that no layer takes, experts of which none is chosen as experts that compute nothing.
    """
    file = config_file(model.config.name_or_path)
    if file is None or not refusals:
        return tuple(refusals)

    def attempt(values: dict[str, Any]) -> None:
        if refusals_of(build(type(model), type(model.config).from_dict(values)).eval()):
            raise ValueError("refused")

    blame = find_size_to_blame(read_values(file), attempt)
    if not blame:
        return tuple(refusals)
    return (msgspec.structs.replace(refusals[0], remedy=blame.remedy("in config.json")),)
