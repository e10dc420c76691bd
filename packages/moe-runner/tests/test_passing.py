"""A model with experts runs on meta when its experts are passed by, and is itself again afterwards."""

from __future__ import annotations

import pytest
import torch
from moe_runner import experts_passed_by
from torch import Tensor, nn

E, H, M = 4, 16, 8


class Workers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.empty(E, 2 * M, H)), nn.Parameter(torch.empty(E, H, M))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return x * float(chosen.unique().tolist()[0])  # needs data, as loops over experts do


class Crew(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.boss, self.workers = nn.Linear(H, E, bias=False), Workers()

    def forward(self, x: Tensor) -> Tensor:
        values, chosen = torch.topk(self.boss(x), 2, dim=-1)
        return self.workers(x, chosen, values.softmax(dim=-1))


@pytest.fixture
def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(H, H), Crew())


def test_runs_on_meta_while_the_context_lasts(model: nn.Module) -> None:
    x = torch.empty(37, H, device="meta")
    with experts_passed_by(model) as names:
        assert names == ("1.workers",)
        assert model(x).shape == (37, H)
    assert all("forward" not in vars(module) for module in model.modules())
    with pytest.raises(Exception, match="Meta"):
        model(x)


def test_real_tensors_are_not_passed_by() -> None:
    torch.manual_seed(0)
    model = Crew()
    nn.init.normal_(model.boss.weight)
    x = torch.randn(3, H)
    expected = model(x)
    with experts_passed_by(model):
        assert torch.equal(model(x), expected)


def test_is_undone_when_the_model_fails(model: nn.Module) -> None:
    with pytest.raises(RuntimeError), experts_passed_by(model):
        model(torch.empty(37, H + 1, device="meta"))
    assert all("forward" not in vars(module) for module in model.modules())
