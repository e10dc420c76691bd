"""Buffers that no checkpoint holds, such as rotary frequencies: computed again by transformers' own initialisation.

In: a model whose buffers are on meta. Out: the same model with those buffers on a device. A buffer that the initialisation does not write
would be garbage: each is filled with a mark first, and one that still carries the mark is an error.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from tf_backend.errors import TfBackendError

_MARK = -77_771


def non_persistent_buffers(model: nn.Module) -> tuple[str, ...]:
    """Full names of the buffers that a state dict leaves out."""
    held = model.state_dict().keys()
    return tuple(name for name, _ in model.named_buffers() if name not in held)


def _initialiser(model: PreTrainedModel, owner: str) -> PreTrainedModel:
    """The innermost model that `owner` is or lies in: the one whose `_init_weights` transformers calls for it."""
    found, path = model, ""
    for part in owner.split(".") if owner else ():
        path = f"{path}.{part}" if path else part
        inner = model.get_submodule(path)
        found = inner if isinstance(inner, PreTrainedModel) else found
    return found


def restore_buffers(model: PreTrainedModel, names: tuple[str, ...], device: torch.device) -> None:
    """Compute the buffers `names` of `model` on `device`.

    Raises:
        TfBackendError: a buffer is not written by the model's `_init_weights`.
    """
    by_owner: dict[str, list[str]] = {}
    for name in names:
        owner, _, leaf = name.rpartition(".")
        by_owner.setdefault(owner, []).append(leaf)
    for owner, leaves in by_owner.items():
        initialise(model, owner, model.get_submodule(owner), tuple(leaves), device)


def initialise(
    model: PreTrainedModel, owner: str, module: nn.Module, leaves: tuple[str, ...], device: torch.device
) -> None:
    """Compute the buffers `leaves` of `module`, which is what `model` has, or had, under the name `owner`.

    Raises:
        TfBackendError: a buffer is not written by the model's `_init_weights`.
    """
    for leaf in leaves:
        old = module._buffers[leaf]
        assert old is not None
        fill = float("nan") if old.dtype.is_floating_point else (_MARK if old.dtype is not torch.bool else True)
        module._buffers[leaf] = torch.full(old.shape, fill, dtype=old.dtype, device=device)
    try:
        with torch.no_grad(), torch.device(device):
            _initialiser(model, owner)._init_weights(module)
    except Exception as error:  # the model's own code, run on one module of a model that holds layers of ours
        raise TfBackendError(
            f"The buffers of `{owner}` are in no checkpoint, and `{type(model).__name__}._init_weights` fails to compute them: "
            f"{type(error).__name__}: {error}. The architecture cannot be served; use `--model-impl vllm`."
        ) from error
    for leaf in leaves:
        new = module._buffers[leaf]
        assert new is not None
        unset = new.isnan().any() if new.dtype.is_floating_point else (new == _MARK).any()
        if bool(unset):
            raise TfBackendError(
                f"The buffer `{owner}.{leaf}` is in no checkpoint, and `{type(model).__name__}._init_weights` does not "
                f"compute it for a `{type(module).__name__}`. Report the architecture; it cannot be served right."
            )
