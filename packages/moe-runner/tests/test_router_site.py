"""Which child of a block is its router, and what keeps it from being moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_runner import RouterSite, find_router
from torch import Tensor, nn

E, H, K = 4, 8, 2


class Chooser(nn.Module):
    """Gives ids, logits and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(E, H))

    def forward(self, x: Tensor, add: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.w.T
        weights, ids = logits.softmax(-1).topk(K, dim=-1)
        return ids, logits, weights


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(E, 2 * H, H)), nn.Parameter(torch.empty(E, H, H))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():  # needs data
            out += x @ self.down[expert]
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.who, self.work = Chooser(), Experts()
        self.extra = nn.Parameter(torch.empty(E))

    def forward(self, x: Tensor) -> Any:
        ids, _, weights = self.who(x.view(-1, H))
        return self.work(x.view(-1, H), ids, weights=weights).view_as(x)


class Returns(Block):
    def forward(self, x: Tensor) -> Any:
        ids, logits, weights = self.who(x.view(-1, H), add=self.extra)
        return self.work(x.view(-1, H), ids, weights=weights).view_as(x), logits


class Casts(Block):
    def forward(self, x: Tensor) -> Any:
        ids, _, weights = self.who(x.view(-1, H))
        return self.work(x.view(-1, H), ids, weights=weights * 2).view_as(x)


class Writes(Block):
    def forward(self, x: Tensor) -> Any:
        ids, _, weights = self.who(x.view(-1, H))
        weights *= 2
        return self.work(x.view(-1, H), ids, weights=weights).view_as(x)


class Chooses(Block):
    def forward(self, x: Tensor) -> Any:
        _, logits, _ = self.who(x.view(-1, H))
        weights, ids = logits.topk(K, dim=-1)
        return self.work(x.view(-1, H), ids, weights=weights).view_as(x)


class Twice(Block):
    def forward(self, x: Tensor) -> Any:
        ids, _, weights = self.who(x.view(-1, H))
        self.who(x.view(-1, H) * 2)
        return self.work(x.view(-1, H), ids, weights=weights).view_as(x)


class Also(Block):
    def forward(self, x: Tensor) -> Any:
        ids, _, weights = self.who(x.view(-1, H))
        return self.work(x.view(-1, H), ids, weights=weights).view_as(x) * weights.sum()


class TwoRuns(Block):
    def forward(self, x: Tensor) -> Any:
        ids, _, weights = self.who(x.view(-1, H))
        once = self.work(x.view(-1, H), ids, weights=weights)
        return self.work(once, ids, weights=weights).view_as(x)


class FollowsData(Block):
    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return out if float(out.sum()) > 0 else -out


def found(kind: type[Block]) -> RouterSite | str:
    with torch.device("meta"):
        block, x = kind(), torch.empty(1, 5, H)
    return find_router(block, (x,), {}, experts="work", places=(0, 1, "weights"))


def test_a_child_whose_values_go_to_the_experts_as_they_come() -> None:
    assert found(Block) == RouterSite("who", weights=2, ids=0, logits=(), given={})
    assert found(Returns) == RouterSite("who", weights=2, ids=0, logits=(1,), given={"add": "extra"})


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Casts, "changes what its router gives"),
        (Writes, "changes what its router gives"),
        (Chooses, "makes ids and weights itself"),
        (Twice, "runs its router more than once"),
        (Also, "for something else too"),
        (TwoRuns, "not called once"),
        (FollowsData, "followed"),
    ],
)
def test_what_keeps_a_router_where_it_is(kind: type[Block], words: str) -> None:
    why = found(kind)
    assert isinstance(why, str)
    assert words in why
