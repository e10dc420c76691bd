"""How transformers reads the checkpoints of one model: its own renamings and converters, kept as data beside a plan.

In: transformers' transforms, and the shapes of the model in memory. Out: the names under which transformers would store the model, found by
reversing its mapping on meta tensors. Nothing of a mapping is written down here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightTransform


class Conversion:
    """How checkpoints of one model are read; see `tf_backend.plan.conversions.conversion_of`.

    Args:
        shapes: of the parameters and persistent buffers in memory, by name.
        base: full name of the decoder, such as ``model.decoder``.
        base_prefix: transformers' own prefix of the base model, such as ``model``.
        transforms: transformers' own, in their order; those of no use when a model is saved are in `only_loading`.
        config: the transformers config that operations read sizes from.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        base: str = "",
        base_prefix: str = "",
        transforms: tuple[WeightTransform, ...] = (),
        config: Any = None,
        only_loading: int = 0,
    ) -> None:
        self.shapes = shapes
        self.base = base
        self.base_prefix = base_prefix
        self.transforms = transforms
        self.config = config
        self._saving = transforms[: len(transforms) - only_loading]

    def get_parameter(self, name: str) -> torch.Tensor:
        """A meta tensor of the shape in memory: an operation of transformers asks its `model` for it."""
        return torch.empty(self.shapes[name], device="meta")

    @functools.cached_property
    def stored_names(self) -> tuple[str, ...]:
        """The names that `save_pretrained` would give to the tensors of the model; empty where transformers cannot reverse its mapping."""
        from transformers.core_model_loading import PrefixChange, revert_weight_conversion

        # Which prefix a checkpoint has is not known, and either is read: as transformers saves a model that it did not load.
        self._weight_conversions = [one for one in self._saving if not isinstance(one, PrefixChange)] or None
        if self._weight_conversions is None:
            return tuple(self.shapes)
        held: Any = {name: self.get_parameter(name) for name in self.shapes}
        model: Any = self
        try:
            return tuple(revert_weight_conversion(model, held))
        except Exception:  # an operation without a reverse; only what an error can name depends on it
            return ()
