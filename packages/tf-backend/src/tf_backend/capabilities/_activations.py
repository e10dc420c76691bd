"""Which activations the engine has one layer for together with the product that follows.

In: vLLM's own lookup by name. Out: names as `fx_match.activation` gives them, each checked by running the layer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def gated_activations() -> tuple[str, ...]:
    """Names, sorted, for which vLLM's layer equals ``activation(x[..., :n]) * x[..., n:]`` in float64."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.vllm import get_current_vllm_config_or_none
    from vllm.model_executor.layers.activation import get_act_and_mul_fn

    probe = torch.linspace(-6.0, 6.0, 128, dtype=torch.float64).view(2, 64)
    gate, up = probe[..., :32], probe[..., 32:]
    found = []
    # Layers read the current configuration when they are built. Making one sets environment variables (for a single
    # rank, among others), so one that is in force is used as it is, and otherwise the environment is put back.
    current = get_current_vllm_config_or_none()
    with _environment_kept(), set_current_vllm_config(VllmConfig() if current is None else current):
        for name, (engine_name, reference) in _candidates().items():
            try:
                layer = get_act_and_mul_fn(engine_name)
            except ValueError:
                continue
            if torch.allclose(layer.forward_native(probe), reference(gate) * up, rtol=1e-12, atol=1e-12):
                found.append(name)
    return tuple(sorted(found))


def _candidates() -> dict[str, tuple[str, Callable[[Tensor], Tensor]]]:
    """Our name for an activation, vLLM's name for it, and what it computes."""
    import torch
    from torch.nn import functional as F

    return {
        "gelu": ("gelu", F.gelu),
        "gelu_tanh": ("gelu_pytorch_tanh", lambda x: F.gelu(x, approximate="tanh")),
        "quick_gelu": ("quick_gelu", lambda x: x * torch.sigmoid(1.702 * x)),
        "relu": ("relu", F.relu),
        "relu2": ("relu2", lambda x: F.relu(x).square()),
        "sigmoid": ("sigmoid", torch.sigmoid),
        "silu": ("silu", F.silu),
        "tanh": ("tanh", torch.tanh),
    }


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    """Put the environment variables back as they were, whatever happens inside."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
