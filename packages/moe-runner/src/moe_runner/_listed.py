"""Blocks whose experts are a list of modules, which run one after another on the tokens that chose them: what such a block gives.

In: a block and what it is called with. Out: whether each token is alone, and the form of what it gives, seen by running a copy on numbers.
Where experts are a list, router and experts are one forward that follows the data, so that the block runs as it is written or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_runner._block import SparseBlock
from moe_runner._numbers import Copy
from moe_runner.routers import Place

_TOKENS, _ALONE = 64, 8


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """What was seen of a block.

    place: where its tokens, [..., hidden], stand in the call. scores: length of the rows [tokens, scores] that it gives beside its output,
    which is like its input; None where it gives that alone. tokenwise: whether each token was seen to be alone.
    """

    place: Place
    scores: int | None
    tokenwise: bool


def read_block(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], block: SparseBlock
) -> ReadBlock | None:
    """Run `module`, recognised as `block` with a list of experts, with random weights and tokens; None where that does not work.

    args, kwargs: what it is called with, tensors on meta or anywhere: one of numbers, its tokens, and nothing else but None.
    """
    places: list[tuple[Place, Any]] = [*enumerate(args), *kwargs.items()]
    given = [(place, value) for place, value in places if value is not None]
    if len(given) != 1 or not isinstance(given[0][1], Tensor) or not given[0][1].is_floating_point():
        return None
    if block.storage != "module list" or given[0][1].ndim < 2 or any(True for _ in module.buffers()):
        return None
    place, tokens = given[0]
    copy = Copy(module, block.num_experts)
    generator = torch.Generator().manual_seed(3)
    _share_weights(copy.module.get_submodule(block.experts))
    for value in {id(p.data.untyped_storage()): p.data for p in copy.module.parameters()}.values():
        value.uniform_(-1.7, 1.7, generator=generator).div_(value.shape[-1] ** 0.5)

    def run(x: Tensor) -> list[Tensor]:
        replaced = tuple(x if at == place else value for at, value in enumerate(args))
        out = copy.run(replaced, {name: x if name == place else value for name, value in kwargs.items()})
        parts = list(out) if isinstance(out, tuple | list) else [out]
        if (
            not 1 <= len(parts) <= 2
            or parts[0].shape != x.shape
            or any(len(p.flatten(0, -2)) != x.shape[-2] for p in parts)
        ):
            raise ValueError("it gives something else than its tokens and their scores")
        return [part.flatten(0, -2) for part in parts]

    try:
        shape = (*(1 for _ in tokens.shape[:-2]), _TOKENS, tokens.shape[-1])
        x = torch.randn(shape, generator=generator, dtype=copy.dtype)
        with torch.no_grad():
            whole, alone = run(x), [run(x[..., t : t + 1, :]) for t in range(_ALONE)]
    except Exception:  # the block's own code, on numbers it was not made for
        return None
    scores = int(whole[1].shape[-1]) if len(whole) > 1 else None
    tokenwise = bool(whole[0].abs().amax(dim=1).min() > 0) and all(
        torch.allclose(part[0], together[t])
        for t, one in enumerate(alone)
        for part, together in zip(one, whole, strict=True)
    )
    return ReadBlock(place, scores, tokenwise)


def _share_weights(experts: nn.Module) -> None:
    """All experts in the list get the weights of the first: what takes the memory of one is enough to see which token depends on which."""
    filled = [child for child in experts.children() if any(True for _ in child.parameters())]
    first = dict(filled[0].named_parameters())
    for child in filled[1:]:
        for name, parameter in child.named_parameters():
            parameter.data = first[name].data
