"""What stands in a model under more than one name, or under none that a checkpoint knows: each would be left without its weights.

In: a model on meta. Out: refusals, and for tied parameters the names of the copies. Applying a plan works name by name; a module that is
reached by two names, or a tensor that is neither parameter nor buffer, would be built once and left empty elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from tf_backend.plan.places import place_of_class
from tf_backend.plan.refusals import REMEDY
from tf_backend.plan.schema import Refusal


def sharing_refusals(model: nn.Module) -> Iterator[Refusal]:
    """Modules with weights under two names, and tensors that are plain attributes."""
    first: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        known = first.setdefault(id(module), name)
        holds = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
        if known != name and holds:
            yield Refusal(
                f"`{type(module).__name__}` is one module under two names, `{known}` and `{name}`, which is not served yet",
                name,
                place_of_class(type(module)),
                REMEDY,
            )
            return
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                yield Refusal(
                    f"`{type(module).__name__}` holds the tensor `{attribute}` as a plain attribute: it is in no checkpoint, and "
                    "nothing computes it again",
                    name,
                    place_of_class(type(module)),
                    "Have the model register it as a buffer, or serve it with `--model-impl vllm`.",
                )
                return


def tied_copies(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each parameter that has several names: the first -> the others."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {group[0]: tuple(group[1:]) for group in names.values() if len(group) > 1}
