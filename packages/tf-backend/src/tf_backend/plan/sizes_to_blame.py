"""Refusals that are no fault of the model's: a size in its config.json is zero or below, or the model fails by its sizes when it runs.

In: a model that is refused, and how to plan another. Out: its refusals, or one of them with the field to correct.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import moe_runner
import msgspec
import torch
from torch import nn
from transformers import PreTrainedModel

from tf_backend.model.blame import Attempt, find_numbers_to_blame, find_size_to_blame
from tf_backend.model.config import config_file, read_values
from tf_backend.model.skeleton import build
from tf_backend.plan.observe import observe
from tf_backend.plan.refusals import FAILS
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

    if refusals[0].remedy == FAILS:
        failing = refusals[0].module
        blame = find_numbers_to_blame(
            read_values(file), _running(model, failing), _numbers(model.get_submodule(failing))
        )
    else:
        blame = find_size_to_blame(read_values(file), attempt)
    if not blame:
        return tuple(refusals)
    return (msgspec.structs.replace(refusals[0], remedy=blame.remedy("in config.json")),)


def _running(failing: PreTrainedModel, module: str) -> Attempt:
    """Runs `module` alone, of a model of given values and as `failing` calls it, on meta; raises what it fails with."""
    with moe_runner.experts_passed_by(failing):
        call = observe(failing).calls[module]

    def attempt(values: dict[str, Any]) -> None:
        model = build(type(failing), type(failing.config).from_dict(values)).eval()
        with moe_runner.experts_passed_by(model), torch.no_grad():
            model.get_submodule(module)(*call.args, **call.kwargs)

    return attempt


def _numbers(module: nn.Module) -> set[int]:
    """Whole numbers that a module holds, or its tensors have as sizes."""
    held = {value for value in vars(module).values() if isinstance(value, int) and not isinstance(value, bool)}
    return held | {size for tensor in module.parameters() for size in tensor.shape}
