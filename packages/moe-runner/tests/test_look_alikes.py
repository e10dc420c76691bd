"""Modules that only look like sparse blocks are not taken for one: layers, samplers, dense mixtures, convolutions."""

from __future__ import annotations

from typing import Any

import moe_runner
import pytest
import torch
import torch.nn.functional as F
from tf_tools.sparse_blocks import Block, E, FunctionalBlock, H, K, Layer, ListBlock, Mlp, Router
from torch import Tensor, nn

X = torch.empty(1, 37, H, device="meta")


def test_only_the_innermost_module_is_the_block() -> None:
    model = nn.Sequential(Layer(Block()), Layer(ListBlock(True)))
    for arguments in ((X,), ()):
        found = [name for name, module in model.named_modules() if moe_runner.recognize(module, arguments)]
        assert [name for name in found if name.endswith("block")] == ["0.block", "1.block"] == found


class Statistics(Router):
    """A child that takes a top-k of scores for its own record, and returns the scores."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        scores = F.linear(x, self.w).sigmoid()
        self.last = torch.topk(scores, K, dim=-1).indices
        return scores


class Recorded(FunctionalBlock):
    def __init__(self) -> None:
        super().__init__()
        self.p = Statistics()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bth,ehi->beti", x, self.up).relu()
        return torch.einsum("beti,eih,bte->bth", hidden, self.down, self.p(x))


def test_a_top_k_that_a_child_keeps_to_itself_is_no_choice() -> None:
    assert moe_runner.recognize(Recorded(), (X,)) is None


class Sampler(nn.Module):
    """Layers in a list, run one after another, and a top-k over as many scores as there are layers, to sample from."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(E))
        self.head = nn.Linear(H, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return torch.topk(self.head(x), K, dim=-1).indices


@pytest.mark.parametrize("vocabulary", [E, 99])
def test_layers_and_a_top_k_for_sampling_are_no_experts(vocabulary: int) -> None:
    assert moe_runner.recognize(Sampler(vocabulary), (X,)) is None


def test_layers_and_a_top_k_over_another_size_are_no_experts_by_structure_either() -> None:
    assert moe_runner.recognize(Sampler(99), ()) is None


class GatedLayers(nn.Module):
    """Layers in sequence, each weighted by scores of which a top-k was taken: the choice reaches them, and they are layers."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Linear(H, E)
        self.q = nn.ModuleList(Mlp() for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.p(x).softmax(-1)
        kept = scores >= torch.topk(scores, K, dim=-1)[0][..., -1:]
        for index, layer in enumerate(self.q):
            x = x + layer(x) * kept[..., index : index + 1]
        return x


def test_layers_that_run_on_each_others_outputs_are_no_experts() -> None:
    assert moe_runner.recognize(GatedLayers(), (X,)) is None


class Unrelated(Block):
    """Every token goes through every expert; the top-k over as many scores only says which heads to report."""

    def forward(self, x: Tensor) -> Any:
        report = self.p(x).topk(K, dim=-1)[1]
        hidden = torch.einsum("bth,eih->beti", x, self.q.a)
        return torch.einsum("beti,ehi->bth", hidden, self.q.b), report


def test_a_choice_that_does_not_reach_the_experts_is_no_router() -> None:
    assert moe_runner.recognize(Unrelated(), (X,)) is None


class SoftBlock(Block):
    """All experts, weighted: no choice. The maximum only keeps the exponentials small."""

    def forward(self, x: Tensor) -> Any:
        logits = self.p(x)
        weights = torch.exp(logits - logits.max(dim=-1, keepdim=True)[0])
        hidden = torch.einsum("bth,eih->beti", x, self.q.a)
        return torch.einsum("beti,ehi,bte->bth", hidden, self.q.b, weights)


def test_a_dense_mixture_is_not_sparse() -> None:
    assert moe_runner.recognize(SoftBlock(), (X,)) is None


class Convolutions(nn.Module):
    """Weights of rank 3 with one first dimension, a matrix with that dimension, and a top-k over it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(H, H, 3, padding=1), nn.Conv1d(H, H, 3, padding=1)
        self.gate = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.topk(self.gate(x), K, dim=-1)[0][..., -1:]
        return self.two(self.one((x * (x >= kept)).transpose(1, 2))).transpose(1, 2)


def test_convolutions_are_no_experts() -> None:
    assert moe_runner.recognize(Convolutions(), (X,)) is None
    assert moe_runner.recognize(Convolutions(), ()) is None


def test_parameters_without_a_shape_do_not_raise() -> None:
    assert moe_runner.recognize(nn.Sequential(nn.LazyLinear(3), Router()), (X,)) is None


def test_modules_with_nothing_to_choose_are_left_untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr("moe_runner._recognize.trace", fail)
    for module in (Mlp(), nn.Sequential(Mlp(), Mlp()), Layer(Mlp()), nn.ModuleList([Mlp(), Mlp()]), Router()):
        assert moe_runner.recognize(module, (X,)) is None
    with pytest.raises(AssertionError, match="traced"):
        moe_runner.recognize(Block(), (X,))
    assert moe_runner.recognize(Layer(Block()), (X,)) is None
