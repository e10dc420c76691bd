"""Running a model on meta although its experts need the data of tensors: they are passed by.

In: a model. Out: a context in which modules that hold experts, called with hidden states, ids and weights, give an empty tensor like the
hidden states and compute nothing. So do blocks whose experts are a list of modules and whose forward follows the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from moe_runner._arguments import routed_call
from moe_runner._listed import ReadBlock, read_block
from moe_runner._numbers import bare
from moe_runner._recognize import recognize
from moe_runner._structure import expert_sites, spelled_choices


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
        for module in list(model.modules()):
            if "forward" not in module.__dict__ and _may_be_listed(module):
                module.__dict__["forward"] = _passing_listed(module)
                changed.append(module)
        yield names
    finally:
        for module in changed:
            module.__dict__.pop("forward", None)


def _passing_listed(module: nn.Module) -> Callable[..., Any]:
    """The forward of what may be a block with a list of experts, while it is passed by: decided by its first call."""
    known: list[ReadBlock] = []

    def pass_by(*args: Any, **kwargs: Any) -> Any:
        if not known and (read := _read_listed(module, args, kwargs)) is not None:
            known.append(read)
        if not known:
            module.__dict__.pop("forward", None)  # it is no such block, and itself again
            return type(module).forward(module, *args, **kwargs)
        (read,) = known
        tokens = args[read.place] if isinstance(read.place, int) else kwargs[read.place]
        if not tokens.is_meta:
            return type(module).forward(module, *args, **kwargs)
        if read.scores is None:
            return torch.empty_like(tokens)
        return torch.empty_like(tokens), tokens.new_empty((tokens.shape[:-1].numel(), read.scores))

    return pass_by


def _read_listed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReadBlock | None:
    """What the block gives that is to be passed by; None where it is none, or can be followed without data."""
    values = [value for value in (*args, *kwargs.values()) if value is not None]
    if len(values) != 1 or not isinstance(values[0], torch.Tensor) or not values[0].is_floating_point():
        return None
    module = bare(module)
    block = recognize(module, args, kwargs)
    if block is None or block.storage != "module list" or not _needs_data(module, args, kwargs):
        return None
    return read_block(module, args, kwargs, block)


def _needs_data(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        module(*args, **kwargs)
    except Exception:
        return True
    return False


def _may_be_listed(module: nn.Module) -> bool:
    return any(site.storage == "module list" and spelled_choices(module, site) for site in expert_sites(module))


def _passing(forward: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    def pass_by(*args: Any, **kwargs: Any) -> Any:
        call = routed_call(args, kwargs)
        if call is not None and call.hidden.is_meta:
            return torch.empty_like(call.hidden)
        return forward(module, *args, **kwargs)

    return pass_by
