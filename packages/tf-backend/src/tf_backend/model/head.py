"""From the last hidden state to the logits, as the traced head does it.

In: a `HeadPlan`. Out: a function over hidden states [tokens, hidden] that gives logits [tokens, vocabulary], built from the engine's
logits processor for the projection and from the plan's own steps around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tf_backend.plan.schema import HeadPlan, HeadStep

STEPS: dict[str, Callable[..., torch.Tensor]] = {
    "mul": torch.mul,
    "div": torch.div,
    "add": torch.add,
    "sub": torch.sub,
    "neg": torch.neg,
    "tanh": torch.tanh,
    "cast_float32": torch.Tensor.float,
}
"""Elementwise steps that a head may take, by canonical name."""


def run_steps(
    steps: Sequence[HeadStep], x: torch.Tensor, modules: Mapping[str, torch.nn.Module] | None = None
) -> torch.Tensor:
    """Apply `steps` in order to `x` [tokens, width].

    Args:
        modules: by full name, those that `steps` call. They are given one row of tokens, [1, tokens, width], as in transformers.
    """
    for step in steps:
        if step.module:
            x = (modules or {})[step.module](x[None])[0]
            continue
        args: list[Any] = [x if arg == "x" else arg for arg in step.args]
        if not isinstance(args[0], torch.Tensor):
            args[0] = torch.tensor(args[0], dtype=x.dtype, device=x.device)
        x = STEPS[step.op](*args)
    return x


class Head:
    """Computes logits: steps before, the projection gathered over ranks, steps after."""

    def __init__(
        self,
        plan: HeadPlan,
        projection: torch.nn.Module,
        bias: torch.Tensor | None,
        modules: Mapping[str, torch.nn.Module],
    ) -> None:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        self.plan = plan
        self.projection = projection
        self.bias = bias
        self.modules = modules
        self.processor = LogitsProcessor(plan.linear.num_embeddings)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits [tokens, vocabulary]; None on ranks that do not gather."""
        hidden = run_steps(self.plan.before, hidden, self.modules)
        logits: torch.Tensor | None = self.processor(self.projection, hidden, self.bias)
        return None if logits is None else run_steps(self.plan.after, logits)
