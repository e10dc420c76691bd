"""Experts that are called with the rows of every token for each of them, zeros where a token is not sent to an expert.

In: the module of the experts and how it is called, or the block that calls it. Out: the same experts as a module that is called with
ids and weights, so that it is read as others are; what the block does around them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_runner._arguments import rows_call
from moe_runner._numbers import Copy
from moe_runner.routers import Place

CHILD = "experts"
_TOKENS, _ALONE = 64, 8


class ByToken(nn.Module):
    """`experts`, called with rows of the rank `rank`, as experts that are called with hidden states, ids and weights."""

    def __init__(self, experts: nn.Module, num_experts: int, rank: int) -> None:
        super().__init__()
        self.experts = experts
        self.num_experts = num_experts
        self.rank = rank

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[tokens, hidden] of hidden states [tokens, hidden], ids and weights [tokens, k]."""
        tokens = torch.arange(len(hidden))
        rows = hidden.new_zeros((self.num_experts, *hidden.shape))
        for chosen in ids.unbind(1):
            rows[chosen, tokens] = hidden
        given = self.experts(rows if self.rank == 3 else rows.flatten(0, 1)).view(rows.shape)
        out = torch.zeros_like(hidden)
        for chosen, weight in zip(ids.unbind(1), weights.unbind(1), strict=True):
            out += given[chosen, tokens] * weight[:, None]
        return out


@dataclass(frozen=True, slots=True)
class RowsGiven:
    """What a block does around experts that are called with rows.

    counts: how many rows of a token were not zeros. tokenwise: whether what it gives for a token was seen to depend on that token alone.
    """

    counts: frozenset[int]
    tokenwise: bool


def read_rows(
    block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, experts: str, num_experts: int
) -> RowsGiven | None:
    """Run `block` with random weights and tokens, its child `experts` aside; None where it cannot be run, or gives anything but rows.

    args, kwargs: what the block is called with, tensors on meta or anywhere; one of them is its tokens, [..., hidden].
    """
    places: list[tuple[Place, Any]] = [*enumerate(args), *kwargs.items()]
    given = [(place, value) for place, value in places if isinstance(value, Tensor)]
    if len(given) != 1 or not given[0][1].is_floating_point() or any(True for _ in block.buffers()):
        return None
    try:
        return _Around(block, args, dict(kwargs), given[0][0], experts, num_experts).run(given[0][1].shape)
    except Exception:  # the block's own code, on numbers it was not made for
        return None


class _Around:
    def __init__(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place, experts: str, num: int
    ) -> None:
        self.args, self.kwargs, self.place = args, kwargs, place
        self.copy = Copy(block, num)
        self.seen = _Seen(num)
        parent, _, leaf = experts.rpartition(".")
        self.copy.module.get_submodule(parent)._modules[leaf] = self.seen
        self.generator = torch.Generator().manual_seed(2)
        for name, value in self.copy.parameters.items():
            if not name.startswith(f"{experts}."):
                value.uniform_(-1.7, 1.7, generator=self.generator).div_(value.shape[-1] ** 0.5)

    def run(self, shape: torch.Size) -> RowsGiven:
        tokens = (*(1 for _ in shape[:-2]), _TOKENS, shape[-1])
        x = torch.randn(tokens, generator=self.generator, dtype=self.copy.dtype)
        whole = self._given(x)
        counts = frozenset(self.seen.counts)
        alone = [self._given(x[..., t : t + 1, :]) for t in range(_ALONE)]
        tokenwise = all(
            len(one) == len(whole)
            and all(
                len(a) == 1 and len(b) == _TOKENS and torch.allclose(a[0], b[t])
                for a, b in zip(one, whole, strict=True)
            )
            for t, one in enumerate(alone)
        )
        return RowsGiven(counts, tokenwise and bool(whole))

    def _given(self, x: Tensor) -> list[Tensor]:
        args = tuple(x if place == self.place else value for place, value in enumerate(self.args))
        kwargs = {place: x if place == self.place else value for place, value in self.kwargs.items()}
        out = self.copy.run(args, kwargs)
        return [part.reshape(-1, part.shape[-1]) for part in (out if isinstance(out, tuple | list) else (out,))]


class _Seen(nn.Module):
    """In the place of the experts: each multiplies its rows by its number."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.counts: set[int] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        call = rows_call(args, kwargs, self.num_experts)
        if call is None:
            raise ValueError("its experts are not called with rows")
        rows = call[1].reshape(self.num_experts, -1, call[1].shape[-1])
        self.counts |= set((rows != 0).any(dim=-1).sum(dim=0).tolist())
        return (rows * torch.arange(1, self.num_experts + 1)[:, None, None]).view(call[1].shape)
