"""Small sparse blocks of the shapes that models have: a router, experts as stacked parameters or as a list of modules, a layer around.

block = Block()                                   # 4 experts, top 2; `p` scores, `q` computes
moe_runner.recognize(block, (torch.empty(1, 37, H, device="meta"),))

Names of modules and parameters say nothing, so that nothing can be read from them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Block", "E", "FunctionalBlock", "H", "I", "K", "Layer", "ListBlock", "Mlp", "Router", "Stack"]

E, K, H, I = 4, 2, 16, 24  # noqa: E741 - experts, top-k, hidden, intermediate


class Mlp(nn.Module):
    def __init__(self, intermediate: int = I) -> None:
        super().__init__()
        self.one = nn.Linear(H, intermediate)
        self.two = nn.Linear(intermediate, H)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(F.silu(self.one(x)))
        return out


class Stack(nn.Module):
    """Experts that cannot run on meta: they look for the tokens of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(E, I, H))
        self.b = nn.Parameter(torch.empty(E, H, I))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(E):
            token, place = torch.where(chosen == expert)
            hidden = F.linear(F.silu(F.linear(x[token], self.a[expert])), self.b[expert])
            out.index_add_(0, token, hidden * weights[token, place, None])
        return out


class Block(nn.Module):
    """A plain one, with a place for what the variants change."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Linear(H, E, bias=False)
        self.q = Stack()

    def scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(logits.softmax(-1), K)

    def forward(self, x: Tensor) -> Any:
        flat = x.view(-1, H)
        weights, chosen = self.scores(self.p(flat))
        return self.q(flat, chosen, weights).view(x.shape)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(E, H))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, chosen = torch.sort(F.linear(x, self.w).sigmoid(), dim=-1, descending=True)
        return values[:, :K], chosen[:, :K]


class FunctionalBlock(nn.Module):
    """No children at all: every expert runs on every token, and the weights of those not chosen are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Parameter(torch.empty(H, E))
        self.up = nn.Parameter(torch.empty(E, H, I))
        self.down = nn.Parameter(torch.empty(E, I, H))

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.route
        values, chosen = logits.topk(K, dim=-1)
        weights = torch.zeros_like(logits).scatter_(-1, chosen, values.softmax(-1))
        hidden = torch.einsum("bth,ehi->beti", x, self.up).relu()
        return torch.einsum("beti,eih,bte->bth", hidden, self.down, weights)


class ListBlock(nn.Module):
    def __init__(self, gather: bool) -> None:
        super().__init__()
        self.p = nn.Linear(H, E)
        self.q = nn.ModuleList(Mlp() for _ in range(E))
        self.gather = gather

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, H)
        weights, chosen = self.p(flat).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.q):
            if self.gather:
                token, place = torch.where(chosen == index)
                out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
            else:
                out = out + expert(flat) * (weights * (chosen == index)).sum(-1, keepdim=True)
        return out.view(x.shape)


class Layer(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.norm = nn.LayerNorm(H)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.block(self.norm(x))
        return out
