"""Blocks with a list of experts run as they are written where each token is alone, and are passed by on meta."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_runner import ReadBlock, experts_passed_by, read_block, recognize
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

E, H, M, K, T = 4, 64, 32, 2, 11


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(H, M, bias=False), nn.Linear(H, M, bias=False)
        self.w2 = nn.Linear(M, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(E)])

    def mixed(self, x: Tensor) -> Tensor:
        return x

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = self.mixed(x.view(-1, H))
        logits = self.gate(flat)
        weights, chosen = logits.softmax(dim=-1).topk(K, dim=-1)
        out = torch.zeros_like(flat)
        for index in range(E):
            token, place = torch.where(chosen == index)
            out.index_add_(0, token, self.experts[index](flat[token]) * weights[token, place, None])
        return out.view(x.shape), logits

    def forward(self, x: Tensor) -> Any:
        return self.both(x)[0]


class WithLogits(Block):
    def forward(self, x: Tensor) -> Any:
        return self.both(x)


class Mixing(Block):
    def mixed(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


class Dense(Block):
    """Runs every expert on every token: nothing in it follows the data."""

    def forward(self, x: Tensor) -> Any:
        weights, chosen = self.gate(x).softmax(dim=-1).topk(K, dim=-1)
        shares = torch.zeros_like(self.gate(x)).scatter(-1, chosen, weights)
        return sum(expert(x) * shares[..., i, None] for i, expert in enumerate(self.experts))


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


X = torch.empty(1, T, H, device="meta")


@pytest.mark.parametrize(("kind", "scores"), [(Block, None), (WithLogits, E)])
def test_what_a_block_gives(kind: type[nn.Module], scores: int | None) -> None:
    module = on_meta(kind)
    block = recognize(module, (X,))
    assert block is not None
    assert read_block(module, (X,), {}, block) == ReadBlock(0, scores, True)
    assert read_block(module, (), {"x": X}, block) == ReadBlock("x", scores, True)
    assert read_block(module, (X, X), {}, block) is None


def test_a_block_that_mixes_tokens() -> None:
    module = on_meta(Mixing)
    block = recognize(module, (X,))
    assert block is not None
    assert read_block(module, (X,), {}, block) == ReadBlock(0, None, False)


@pytest.mark.parametrize("kind", [Block, WithLogits])
def test_runs_on_meta_while_the_context_lasts(kind: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Identity(), on_meta(kind))
    with pytest.raises(Exception, match="nonzero"):
        model(X)
    with experts_passed_by(model):
        out = model(X)
        shapes = [part.shape for part in out] if isinstance(out, tuple) else [out.shape]
        assert shapes == [(1, T, H), (T, E)][: len(shapes)]
        assert recognize(model[1], (X,)) is not None
        assert recognize(model, (X,)) is None
    assert all("forward" not in vars(module) for module in model.modules())


def test_what_needs_no_data_is_not_passed_by() -> None:
    calls: list[nn.Module] = []
    model = on_meta(Dense)
    model.get_submodule("experts.2").register_forward_hook(lambda module, args, out: calls.append(module))
    with experts_passed_by(model):
        assert model(X).shape == X.shape
    assert len(calls) == 1


def test_real_tensors_are_not_passed_by() -> None:
    torch.manual_seed(0)
    model, x = WithLogits(), torch.randn(1, T, H)
    expected = model(x)
    with experts_passed_by(model):
        assert all(torch.equal(a, b) for a, b in zip(model(x), expected, strict=True))


def test_the_number_of_tokens_stays_open_in_a_compiled_graph() -> None:
    sizes = StatelessSymbolicContext([DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    mode = FakeTensorMode(shape_env=ShapeEnv())
    tokens = mode.from_tensor(torch.empty(1, T, H), symbolic_context=sizes)
    with mode:
        out, rows = torch.ops.moe_runner.written_block(tokens, E, "layers.0.mlp")
    assert isinstance(out.shape[1], torch.SymInt)
    assert isinstance(rows.shape[0], torch.SymInt)
    assert rows.shape[1] == E
