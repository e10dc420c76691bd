"""What experts compute is read from what their forward gives, whatever their tensors are called and however it loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from moe_runner import Experts, ExpertTensor, Gate, read_experts
from torch import Tensor, nn

E, H, M, K, T = 4, 64, 32, 2, 37


class Loop(nn.Module):
    """Experts in a loop over those that were hit; what happens between the projections is given."""

    def __init__(self, between: Callable[[Tensor], Tensor], first: tuple[int, ...], second: tuple[int, ...]) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(first))
        self.b = nn.Parameter(torch.empty(second))
        self.between = between

    def project(self, x: Tensor, which: Tensor, index: int) -> Tensor:
        return x @ which[index].T

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            if index >= E:
                continue
            token, place = torch.where(chosen == index)
            hidden = self.between(self.project(x[token], self.a, index))
            out.index_add_(0, token, self.project(hidden, self.b, index) * weights[token, place, None])
        return out


class Turned(Loop):
    def project(self, x: Tensor, which: Tensor, index: int) -> Tensor:
        return x @ which[index]


class OnInput(Loop):
    """The weight is laid on what goes in, which is another thing once there is an activation."""

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            token, place = torch.where(chosen == index)
            hidden = self.between(self.project(x[token] * weights[token, place, None], self.a, index))
            out.index_add_(0, token, self.project(hidden, self.b, index))
        return out


class Next(Loop):
    """Each expert's second matrix is its neighbour's."""

    def project(self, x: Tensor, which: Tensor, index: int) -> Tensor:
        return x @ which[index if which is self.a else (index + 1) % E].T


class Averaged(Loop):
    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=0), weights, chosen)


def gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def between(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        return function(gate) * up

    return between


def up_first(h: Tensor) -> Tensor:
    up, gate = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def alternating(h: Tensor) -> Tensor:
    return F.gelu(h[..., ::2], approximate="tanh") * h[..., 1::2]


def clamped(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=2.5)) * up.clamp(-2.5, 2.5)


def one_sided(h: Tensor) -> Tensor:
    """Like `clamped`, but for the lower end of the up projection."""
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=2.5)) * up.clamp(max=2.5)


def offset(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    gate, up = gate.clamp(max=5.0), up.clamp(-5.0, 5.0)
    return gate * torch.sigmoid(1.3 * gate) * (up + 1)


WIDE, DOWN = (E, 2 * M, H), (E, H, M)


def read(module: nn.Module, hidden: int = H) -> Experts:
    module = module.to("meta")
    call = (
        torch.empty(T, hidden, device="meta"),
        torch.empty(T, K, device="meta"),
        torch.empty(T, K, dtype=torch.int64, device="meta"),
    )
    return read_experts(module, call, num_experts=E)


@pytest.mark.parametrize(
    ("module", "gate", "first"),
    [
        (Loop(gated(F.silu), WIDE, DOWN), Gate("silu"), ExpertTensor("a", ("gate", "up"))),
        (Loop(gated(F.gelu), WIDE, DOWN), Gate("gelu"), ExpertTensor("a", ("gate", "up"))),
        (Loop(up_first, WIDE, DOWN), Gate("silu"), ExpertTensor("a", ("up", "gate"))),
        (Loop(alternating, WIDE, DOWN), Gate("gelu_tanh"), ExpertTensor("a", ("gate", "up"), interleaved=True)),
        (Loop(clamped, WIDE, DOWN), Gate("silu_clamped", limit=2.5), ExpertTensor("a", ("gate", "up"))),
        (Loop(offset, WIDE, DOWN), Gate("swiglu_oai", limit=5.0, alpha=1.3), ExpertTensor("a", ("gate", "up"))),
        (Loop(lambda h: F.relu(h).square(), (E, M, H), DOWN), Gate("relu2", gated=False), ExpertTensor("a", ("up",))),
        (
            Turned(gated(F.silu), (E, H, 2 * M), (E, M, H)),
            Gate("silu"),
            ExpertTensor("a", ("gate", "up"), transposed=True),
        ),
    ],
)  # fmt: skip
def test_reads(module: nn.Module, gate: Gate, first: ExpertTensor) -> None:
    spec = read(module).spec
    assert spec is not None
    assert spec.gate == gate
    assert spec.tensors[0] == first
    assert spec.tensors[1].halves == ("down",)
    assert spec.arguments == (0, 2, 1)
    assert (spec.num_experts, spec.top_k, spec.hidden_size, spec.intermediate_size) == (E, K, H, M)


def test_square_matrices_are_told_apart_by_numbers() -> None:
    """With H = 2 M both matrices of an expert have shapes that each could have; with H = M the first may lie either way."""
    spec = read(Loop(gated(F.silu), (E, 2 * M, 2 * M), (E, 2 * M, M)), 2 * M).spec
    assert spec is not None
    assert not any(tensor.transposed for tensor in spec.tensors)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Loop(one_sided, WIDE, DOWN), "none of the formulas"),
        (Loop(gated(lambda g: F.silu(g) * 1.1), WIDE, DOWN), "none of the formulas"),
        (Loop(gated(F.softplus), WIDE, DOWN), "none of the formulas"),
        (OnInput(gated(F.silu), WIDE, DOWN), "none of the formulas"),
        (Next(gated(F.silu), WIDE, DOWN), "zeros"),
        (Averaged(gated(F.softplus), WIDE, DOWN), "depends on other tokens"),
        (Loop(lambda h: h[..., :M] * h[..., M:], WIDE, DOWN), "several formulas"),
        (Loop(lambda h: F.silu(h[..., :M]) * h[..., M : 2 * M], (E, 3 * M, H), DOWN), "not those of gated experts"),
        (Loop(lambda h: h[..., :M] * 0.0, WIDE, DOWN), "zeros"),
        (Loop(lambda h: torch.full_like(h[..., :M], float("nan")), WIDE, DOWN), "finite"),
        (Loop(lambda h: h.no_such_thing(), WIDE, DOWN), "AttributeError"),
    ],
)  # fmt: skip
def test_does_not_read(module: nn.Module, words: str) -> None:
    found = read(module)
    assert found.spec is None
    assert words in found.reason


def test_what_is_not_known_is_at_least_known_to_treat_each_token_alone() -> None:
    assert read(Loop(one_sided, WIDE, DOWN)).tokenwise
    assert not read(Averaged(gated(F.softplus), WIDE, DOWN)).tokenwise


def test_another_call_is_not_read() -> None:
    with torch.device("meta"):
        found = read_experts(nn.Linear(H, H), (torch.empty(T, H),), num_experts=E)
    assert "not called with" in found.reason


class Null(Loop):
    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        idle = (weights * (chosen >= E)).sum(dim=-1, keepdim=True)
        return super().forward(x, weights, chosen) + x * idle


@pytest.mark.parametrize(("kind", "null"), [(Loop, "zero"), (Null, "identity")])
def test_ids_beyond_the_experts(kind: type[Loop], null: str) -> None:
    spec = read(kind(gated(F.silu), WIDE, DOWN)).spec
    assert spec is not None
    assert spec.null == null


class Packed(nn.Module):
    """Three matrices of all experts, one below the other; the last is used as it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q, self.r = (nn.Parameter(torch.empty(E * M, H)) for _ in range(3))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        p, q, r = (t.view(E, M, H) for t in (self.p, self.q, self.r))
        for index in chosen.unique().tolist():
            token, place = torch.where(chosen == index)
            hidden = F.silu(x[token] @ q[index].T) * (x[token] @ p[index].T)
            out.index_add_(0, token, (hidden @ r[index]) * weights[token, place, None])
        return out


def test_packed_matrices() -> None:
    spec = read(Packed()).spec
    assert spec is not None
    by_half = {tensor.halves: tensor for tensor in spec.tensors}
    assert by_half["gate",] == ExpertTensor("q", ("gate",), packed=True)
    assert by_half["up",] == ExpertTensor("p", ("up",), packed=True)
    assert by_half["down",] == ExpertTensor("r", ("down",), packed=True, transposed=True)


class Biased(Loop):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.c, self.d = nn.Parameter(torch.empty(E, 2 * M)), nn.Parameter(torch.empty(E, H))

    def project(self, x: Tensor, which: Tensor, index: int) -> Tensor:
        return x @ which[index].T + (self.c if which is self.a else self.d)[index]


def test_biases() -> None:
    spec = read(Biased(alternating, WIDE, DOWN)).spec
    assert spec is not None
    assert spec.has_bias
    assert spec.tensors[2:] == (
        ExpertTensor("c", ("gate", "up"), interleaved=True, bias=True),
        ExpertTensor("d", ("down",), bias=True),
    )
