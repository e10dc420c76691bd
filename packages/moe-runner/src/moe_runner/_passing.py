"""Running a model on meta although its experts need the data of tensors: they are passed by.

In: a model. Out: a context in which modules that hold experts, called with hidden states, ids and weights, give an empty tensor like the
hidden states and compute nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from moe_runner._arguments import routed_call
from moe_runner._structure import expert_sites


def expert_holders(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules in `model` that may be called as experts, outer ones first: each lies between a block and stacked weights."""
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        for site in expert_sites(module):
            parts = site.name.split(".") if site.name and site.storage == "stacked parameters" else []
            for end in range(1, len(parts) + 1):
                path = ".".join(parts[:end])
                found[f"{name}.{path}" if name else path] = None
    return tuple(found)


@contextmanager
def experts_passed_by(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Pass the experts of `model` by while the context lasts; gives their names (`expert_holders`)."""
    names = expert_holders(model)
    changed: list[nn.Module] = []
    try:
        for name in names:
            module = model.get_submodule(name)
            if "forward" not in module.__dict__:
                module.__dict__["forward"] = _passing(type(module).forward, module)
                changed.append(module)
        yield names
    finally:
        for module in changed:
            del module.__dict__["forward"]


def _passing(forward: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    def pass_by(*args: Any, **kwargs: Any) -> Any:
        call = routed_call(args, kwargs)
        if call is not None and call.hidden.is_meta:
            return torch.empty_like(call.hidden)
        return forward(module, *args, **kwargs)

    return pass_by
