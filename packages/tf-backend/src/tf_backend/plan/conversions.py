"""Checkpoints that transformers stores otherwise than it holds them in memory.

In: a model. Out: a refusal where loading by name would put other values, or another tensor, in a place of the same name. A conversion whose
names are not the model's own needs none: a checkpoint that it is for is told by its names, at load.
"""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform

from tf_backend.plan.places import place_of_class
from tf_backend.plan.schema import Refusal


def checkpoint_renamings(model: PreTrainedModel) -> tuple[WeightTransform, ...]:
    """The plain renamings by which transformers reads checkpoints of this model that were saved under other names, in order."""
    transforms = get_model_conversion_mapping(model, add_legacy=True)
    return tuple(transform for transform in transforms if type(transform) is WeightRenaming)


def conversion_refusals(model: PreTrainedModel) -> Iterator[Refusal]:
    """At most one refusal: the first name that a conversion would change."""
    names = set(model.state_dict())
    for transform in get_model_conversion_mapping(model, add_legacy=False):
        for name in sorted(names):
            if _changes(transform, name, names):
                yield Refusal(
                    f"transformers converts the checkpoint tensor `{name}` of `{type(model).__name__}` when it loads it "
                    f"({type(transform).__name__}), which is not served yet",
                    "",
                    place_of_class(type(model)),
                    "Load it with transformers and save it again under a class that needs no conversion, or serve it with "
                    "`--model-impl vllm`.",
                )
                return


def _changes(transform: WeightTransform, name: str, names: set[str]) -> bool:
    """Whether a stored tensor called `name` would end in another place of the model, or in its own with other values."""
    renamed, pattern = transform.rename_source_key(name)
    if pattern is None:
        return False
    return isinstance(transform, WeightConverter) or (renamed != name and renamed in names)
