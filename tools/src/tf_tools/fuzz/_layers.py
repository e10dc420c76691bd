"""What a planned layer is on one rank, of plain torch: its part of the weights, and the sum over ranks where it is split on inputs.

In: a spec, the module whose children it takes over, the rank. Out: a layer. Written from what the specs say, apart from the engine's
layers and from the zoo's stand-ins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from vllm_layers_bridge.layers.parallel_norm import ParallelRMSNorm
from vllm_layers_bridge.layers.rotary import Rotary
from vllm_layers_bridge.specs import (
    ActivationAndMulSpec,
    LinearSpec,
    MergedLinearSpec,
    QKVLinearSpec,
    RMSNormSpec,
    RotarySpec,
    Source,
)

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


class RanksPart(Exception):
    """A rank ended before the others: it raised, or waits for a sum that they never take."""


@dataclass
class Exchange:
    """Sums tensors over ranks that run as threads of this process."""

    ranks: int
    seconds: float = 20.0
    _barrier: threading.Barrier = field(init=False)
    _given: list[torch.Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.ranks)
        self._given = [None] * self.ranks

    def sum(self, rank: int, value: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on each of them; RanksPart where another one has ended."""
        if self.ranks == 1:
            return value
        self._given[rank] = value
        self.meet()
        parts = [part for part in self._given if part is not None]
        if any(part.shape != value.shape for part in parts):
            raise RanksPart("the ranks sum values of other shapes")
        total = torch.stack(parts).sum(0)
        self.meet()
        return total

    def meet(self) -> None:
        """Wait for all ranks."""
        try:
            self._barrier.wait(self.seconds)
        except threading.BrokenBarrierError:
            raise RanksPart("another rank has ended, or takes fewer sums") from None

    def leave(self) -> None:
        """Let no other rank wait for this one."""
        self._barrier.abort()


@dataclass(frozen=True)
class Rank:
    """One of several, and how it sums."""

    number: int
    exchange: Exchange

    @property
    def ranks(self) -> int:
        return self.exchange.ranks

    def run(self, length: int, pieces: int) -> slice:
        """Which of `length` entries this rank holds, in `pieces` equal runs."""
        assert length % pieces == 0, f"{length} entries in {pieces} runs"
        at, size = self.number * pieces // self.ranks, length // pieces
        return slice(at * size, (at + 1) * size)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        return self.exchange.sum(self.number, value)


def layer_on_rank(spec: object, module: nn.Module, rank: Rank) -> nn.Module:
    """The layer that `spec` becomes in `module`, or in its place."""
    match spec:
        case LinearSpec():
            return _linear(spec, module, rank)
        case MergedLinearSpec():
            pieces = 1 if spec.style == "replicated" else rank.ranks
            return _side_by_side([_run(_part(module, s), rank, pieces) for s in spec.sources])
        case QKVLinearSpec():
            of_keys = min(rank.ranks, spec.num_kv_heads)
            runs = zip(spec.sources, (rank.ranks, of_keys, of_keys), strict=True)
            parts = [_run(_part(module, source), rank, number) for source, number in runs]
            return _side_by_side(parts)
        case ActivationAndMulSpec():
            return _ActivationAndMul(spec.activation)
        case RMSNormSpec():
            return _norm(spec, module, rank)
        case RotarySpec():
            return Rotary(spec, _turn, ("cpu",))
        case _:
            raise TypeError(f"no plain layer stands for {spec}")


_Part = tuple[torch.Tensor, torch.Tensor | None]


def _part(module: nn.Module, source: Source) -> _Part:
    child = module.get_submodule(source.child)
    return _rows(_weight(child, source.transposed), child, source.rows)


def _rows(weight: torch.Tensor, child: nn.Module, rows: tuple[int, int] | None) -> _Part:
    bias = getattr(child, "bias", None)
    start, stop = rows or (0, len(weight))
    return weight[start:stop], bias[start:stop] if isinstance(bias, torch.Tensor) else None


def _weight(child: nn.Module, is_transposed: bool) -> torch.Tensor:
    weight = child.get_parameter("weight")
    return weight.t() if is_transposed else weight


def _run(part: _Part, rank: Rank, pieces: int) -> _Part:
    weight, bias = part
    kept = rank.run(len(weight), pieces)
    return weight[kept], None if bias is None else bias[kept]


def _side_by_side(parts: list[_Part]) -> nn.Module:
    biases = [bias for _, bias in parts if bias is not None]
    assert len(biases) in (0, len(parts)), "some parts of a merged layer have a bias and others none"
    return _Linear(torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None)


def _linear(spec: LinearSpec, child: nn.Module, rank: Rank) -> nn.Module:
    weight, bias = _rows(_weight(child, spec.transposed), child, None)
    if spec.style == "row":
        return _Linear(weight[:, rank.run(weight.shape[1], rank.ranks)], bias, rank.sum)
    if spec.style == "column":
        return _Linear(*_run((weight, bias), rank, spec.runs or rank.ranks))
    return _Linear(weight, bias)


def _norm(spec: RMSNormSpec, module: nn.Module, rank: Rank) -> nn.Module:
    weight = module.get_parameter("weight") if spec.has_weight else None
    if spec.pieces == 1:
        return _RMSNorm(spec, weight)
    layer = ParallelRMSNorm(spec, rank.ranks, rank.sum)
    if weight is not None:
        run = weight[rank.run(len(weight), spec.pieces)]
        layer.weight = nn.Parameter(run.clone(), requires_grad=False)
    return layer


def _turn(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_dim: int,
    cos_sin: torch.Tensor,
    is_neox: bool,
) -> None:
    """What the engine's rotary kernel does to rows of [tokens, heads * head_dim]: each head turned where it lies."""
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    for rows in (query, key):
        for head in rows.view(len(rows), -1, head_dim).unbind(1) if rows is not None else ():
            turning = head[:, : 2 * cos.shape[-1]]
            first, second = turning.chunk(2, dim=-1) if is_neox else (turning[:, ::2], turning[:, 1::2])
            one, other = first * cos - second * sin, second * cos + first * sin
            first.copy_(one)
            second.copy_(other)


class _Linear(nn.Module):
    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)
        self.reduce = reduce

    def forward(self, x: torch.Tensor, /) -> torch.Tensor:
        """[..., local in] to [..., local out], summed over ranks where that was asked for."""
        if self.reduce is None:
            return nn.functional.linear(x, self.weight, self.bias)
        total = self.reduce(nn.functional.linear(x, self.weight))
        return total if self.bias is None else total + self.bias


class _ActivationAndMul(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = ACTIVATIONS[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 2 n] to [..., n]."""
        half = x.shape[-1] // 2
        return self.function(x[..., :half]) * x[..., half:]


class _RMSNorm(nn.Module):
    def __init__(self, spec: RMSNormSpec, weight: torch.Tensor | None) -> None:
        super().__init__()
        assert weight is None or weight.shape == (spec.hidden_size,)
        self.spec, self.weight = spec, None if weight is None else nn.Parameter(weight.clone(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Over the last axis, of the size that the spec says."""
        assert x.shape[-1] == self.spec.hidden_size
        normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.spec.eps)
        return normed if self.weight is None else normed * (self.weight + self.spec.offset)
