"""How transformers reads the checkpoints of a model: its own renamings and converters, as it would apply them.

In: a model on meta. Out: a `Conversion`. Names and operations are transformers'; nothing of a mapping is written down here.
"""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from tf_backend.weights.conversion import Conversion


def conversion_of(model: PreTrainedModel, base: str) -> Conversion:
    """How checkpoints of `model` are read. `base`: full name of the decoder."""
    transforms = get_model_conversion_mapping(model, add_legacy=True)
    saving = get_model_conversion_mapping(model, add_legacy=False)
    return Conversion(
        {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
        base,
        model.base_model_prefix,
        tuple(transforms),
        model.config,
        only_loading=len(transforms) - len(saving),
    )
