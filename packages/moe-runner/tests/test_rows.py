"""Experts that are called with the rows of every token for each of them: read, and computed where rows are not zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_runner import ExpertsSpec, ExpertTensor, Gate, RoutedExperts, RowsGiven, is_rows_call, read_experts, read_rows
from moe_runner.layer import as_given
from torch import Tensor, nn

E, H, M, K, T = 4, 64, 32, 2, 11


class Rowwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(E, H, 2 * M))
        self.b = nn.Parameter(torch.empty(E, M, H))

    def forward(self, rows: Tensor) -> Tensor:
        gate, up = torch.bmm(rows.view(E, -1, H), self.a).chunk(2, dim=-1)
        return torch.bmm(up * nn.functional.silu(gate), self.b).view(-1, H)


class Biased(Rowwise):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.empty(E, H))

    def forward(self, rows: Tensor) -> Tensor:
        return (super().forward(rows).view(E, -1, H) + self.c[:, None]).view(-1, H)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.experts = Rowwise()

    def scores(self, x: Tensor) -> Tensor:
        values, chosen = self.router(x).topk(K, dim=1)
        return torch.full((len(x), E), -torch.inf, dtype=x.dtype).scatter(1, chosen, values).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, H)
        out = self.experts(x.repeat(E, 1) * self.scores(x).t().reshape(-1, 1))
        return out.view(E, -1, H).sum(dim=0)


class Threshold(Block):
    def scores(self, x: Tensor) -> Tensor:
        return self.router(x).relu()


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


@pytest.mark.parametrize("shape", [(E * T, H), (E, T, H)])
def test_experts_are_read(shape: tuple[int, ...]) -> None:
    rows = torch.empty(shape, device="meta")
    found = read_experts(on_meta(Rowwise), (rows,), num_experts=E, top_k=K)
    assert found.spec is not None, found.reason
    assert found.spec.takes_rows
    assert (found.spec.arguments, found.spec.top_k, found.spec.gate) == ((0,), K, Gate("silu"))
    assert found.spec.tensors == (
        ExpertTensor("a", ("gate", "up"), transposed=True),
        ExpertTensor("b", ("down",), transposed=True),
    )


def test_of_rows_of_zeros_biases_make_something_else() -> None:
    found = read_experts(on_meta(Biased), (torch.empty(E * T, H, device="meta"),), num_experts=E, top_k=K)
    assert found.spec is None
    assert "biases" in found.reason


def test_a_call_with_rows() -> None:
    assert is_rows_call((torch.empty(E * T, H),), {}, E)
    assert is_rows_call((), {"rows": torch.empty(E, T, H), "mask": None}, E)
    assert not is_rows_call((torch.empty(E * T + 1, H),), {}, E)
    assert not is_rows_call((torch.empty(E * T, H), torch.empty(3)), {}, E)
    assert not is_rows_call((torch.empty(E * T, H), 3), {}, E)


class Regrouped(Block):
    """Takes the rows of one token for those of others."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, H)
        out = self.experts(x.repeat(E, 1) * self.scores(x).t().reshape(-1, 1))
        return out.view(-1, E, H).sum(dim=1)


class WithIds(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, H)
        return self.experts(x, self.scores(x).topk(K, dim=1).indices)


def test_what_a_block_gives_and_makes_of_it() -> None:
    given: dict[str, Any] = {"experts": "experts", "num_experts": E}
    x = (torch.empty(1, T, H, device="meta"),)
    assert read_rows(on_meta(Block), x, {}, **given) == RowsGiven(frozenset({K}), True)
    varying = read_rows(on_meta(Threshold), x, {}, **given)
    assert varying is not None
    assert len(varying.counts) > 1
    assert read_rows(on_meta(Regrouped), x, {}, **given) == RowsGiven(frozenset({K}), False)
    assert read_rows(on_meta(WithIds), x, {}, **given) is None
    assert read_rows(on_meta(Block), (*x, *x), {}, **given) is None


class Runner(nn.Module):
    """Stands for vLLM's runner: experts that multiply by their number plus one, and count what they are given."""

    def forward(self, hidden: Tensor, scores: Tensor) -> Tensor:
        weights, ids = as_given(hidden, scores, 1, renormalize=False)
        assert hidden.shape == (T * K, H)
        return hidden * weights * (ids + 1)


def test_only_rows_that_are_not_zeros_are_computed() -> None:
    tensors = (ExpertTensor("a", ("gate", "up")), ExpertTensor("b", ("down",)))
    layer = RoutedExperts(ExpertsSpec(E, K, H, M, Gate("silu"), tensors, ("rows",), runs_as="silu"), Runner())
    rows = torch.zeros(E, T, H)
    for token in range(T):
        for expert in torch.randperm(E)[: K if token else 1]:
            rows[expert, token] = torch.randn(H)
    expected = rows * torch.arange(1, E + 1)[:, None, None]
    assert torch.allclose(layer(rows=rows), expected)
    flat = RoutedExperts(ExpertsSpec(E, K, H, M, Gate("silu"), tensors, (0,), runs_as="silu"), Runner())
    assert torch.allclose(flat(rows.flatten(0, 1)), expected.flatten(0, 1))
