"""Recognition of small sparse blocks of every shape, and of what can be said of those that cannot be followed."""

from __future__ import annotations

import copy
from typing import Any

import moe_runner
import pytest
import torch
from tf_tools.sparse_blocks import Block, E, FunctionalBlock, H, I, K, Layer, ListBlock, Mlp, Router
from torch import Tensor, nn

X = torch.empty(1, 37, H, device="meta")


def test_a_plain_block() -> None:
    block = moe_runner.recognize(Block(), (X,))
    assert block is not None
    assert block.describe() == "4 experts, top 2, softmax before top-k, experts as stacked parameters `q.a`"
    assert (block.experts, block.parameters, block.shared_experts) == ("q", ("q.a", "q.b"), None)
    assert block.returns_router_logits is False
    assert block.evidence[0] == "experts: `q.a` [4, 24, 16], `q.b` [4, 16, 24]"
    assert "sparse_blocks:" in block.evidence[1]
    assert block.evidence[1].endswith("return torch.topk(logits.softmax(-1), K)")


def test_inputs_by_keyword_on_any_device_and_nothing_is_changed() -> None:
    module = Block()
    before = copy.deepcopy(module.state_dict())
    block = moe_runner.recognize(module, (), {"x": torch.randn(1, 37, H)})
    assert block is not None
    assert block.top_k == K
    assert all(torch.equal(value, before[name]) or value.isnan().any() for name, value in module.state_dict().items())


def test_never_called_is_told_by_structure_and_says_what_is_not_known() -> None:
    block = moe_runner.recognize(Block(), (), {})
    assert block is not None
    assert not block.called
    assert (block.num_experts, block.top_k, block.score, block.score_order) == (E, None, None, None)
    assert (block.shared_experts, block.returns_router_logits) == (None, None)
    assert block.describe() == (
        "4 experts, never called, so how tokens are routed is not known, experts as stacked parameters `q.a`"
    )


class TupleBlock(Block):
    def forward(self, x: Tensor) -> Any:
        flat = x.view(-1, H)
        logits = self.p(flat)
        values, chosen = logits.topk(K, dim=1)
        return self.q(flat, chosen, values.softmax(dim=-1)).view(x.shape), logits


def test_a_block_that_returns_its_router_logits_and_scores_after_the_choice() -> None:
    block = moe_runner.recognize(TupleBlock(), (X,))
    assert block is not None
    assert (block.score, block.score_order, block.returns_router_logits) == ("softmax", "after", True)
    assert block.describe().endswith("returns its router logits")


class CorrectedBlock(Block):
    """Sigmoid scores, a bias that only the choice sees, a choice among groups first, shared experts."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Buffer(torch.zeros(E))
        self.r = Mlp(2 * I)

    def scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        biased = scores + self.bias
        groups = biased.view(-1, 2, E // 2).topk(2, dim=-1)[0].sum(dim=-1)
        chosen_groups = torch.topk(groups, k=1, dim=-1)[1]
        mask = torch.zeros_like(groups).scatter_(1, chosen_groups, 1)
        kept = biased.masked_fill(~mask.repeat_interleave(E // 2, dim=1).bool(), 0.0)
        chosen = torch.topk(kept, k=K, dim=-1, sorted=False)[1]
        return scores.gather(1, chosen), chosen

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.r(x)


def test_sigmoid_with_a_correction_bias_groups_and_shared_experts() -> None:
    block = moe_runner.recognize(CorrectedBlock(), (X,))
    assert block is not None
    assert (block.top_k, block.score, block.score_order, block.shared_experts) == (K, "sigmoid", "before", "r")
    assert block.evidence[1].endswith("chosen = torch.topk(kept, k=K, dim=-1, sorted=False)[1]")


class RoutedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.p = Router()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        flat = x.view(-1, H)
        weights, chosen = self.p(flat)
        return self.q(flat, chosen, weights).view(x.shape)


def test_a_choice_by_sorting_in_a_child_that_routes() -> None:
    block = moe_runner.recognize(RoutedBlock(), (X,))
    assert block is not None
    assert (block.top_k, block.score, block.score_order) == (K, "sigmoid", "before")


def test_a_functional_block_holds_its_experts_itself() -> None:
    for arguments in ((X,), ()):
        block = moe_runner.recognize(FunctionalBlock(), arguments)
        assert block is not None
        assert (block.experts, block.parameters, block.num_experts) == ("", ("up", "down"), E)
    called = moe_runner.recognize(FunctionalBlock(), (X,))
    assert called is not None
    assert (called.top_k, called.score, called.score_order) == (K, "softmax", "after")


@pytest.mark.parametrize("gather", [True, False])
def test_experts_as_a_list_of_modules(gather: bool) -> None:
    block = moe_runner.recognize(ListBlock(gather), (X,))
    assert block is not None
    assert block.describe() == "4 experts, top 2, softmax before top-k, experts as module list `q`"
    assert block.parameters == ("q.0.one.weight", "q.0.one.bias", "q.0.two.weight", "q.0.two.bias")
    assert any("not followed beyond" in line for line in block.evidence) is gather
    assert block.returns_router_logits is (None if gather else False)


ROUTERS = {"plain": lambda scores, count: torch.topk(scores, count, dim=-1)}


class TableRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(H, E)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, chosen = ROUTERS["plain"](self.w(x), K)
        return values.sigmoid(), chosen


class TableBlock(RoutedBlock):
    def __init__(self) -> None:
        super().__init__()
        self.p = TableRouter()  # type: ignore[assignment]


def test_a_choice_that_no_reading_of_the_code_finds_is_found_in_the_trace() -> None:
    block = moe_runner.recognize(TableBlock(), (X,))
    assert block is not None
    assert (block.top_k, block.score, block.score_order) == (K, "sigmoid", "after")
    found = [name for name, module in Layer(TableBlock()).named_modules() if moe_runner.recognize(module, (X,))]
    assert found == ["block"]


class TwiceScored(Block):
    def scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        values, chosen = logits.sigmoid().topk(K, dim=-1)
        return values.softmax(dim=-1), chosen


def test_two_score_functions_are_not_called_one() -> None:
    block = moe_runner.recognize(TwiceScored(), (X,))
    assert block is not None
    assert (block.score, block.score_order, block.top_k) == (None, None, K)


class ThresholdBlock(FunctionalBlock):
    """The experts whose scores reach the k-th best: no index is ever used."""

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ self.route).sigmoid()
        weights = scores * (scores >= scores.topk(K, dim=-1).values[..., -1:])
        hidden = torch.einsum("bth,ehi->beti", x, self.up).relu()
        return torch.einsum("beti,eih,bte->bth", hidden, self.down, weights)


def test_a_choice_by_a_threshold() -> None:
    block = moe_runner.recognize(ThresholdBlock(), (X,))
    assert block is not None
    assert (block.top_k, block.score, block.score_order) == (K, "sigmoid", "before")


class ScoredOutside(RoutedBlock):
    """The block scores, the child only picks."""

    def __init__(self) -> None:
        super().__init__()
        self.p = Picker()  # type: ignore[assignment]
        self.w = nn.Linear(H, E)

    def forward(self, x: Tensor) -> Any:
        flat = x.view(-1, H)
        weights, chosen = self.p(self.w(flat).softmax(-1))
        return self.q(flat, chosen, weights).view(x.shape)


class Picker(nn.Module):
    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(scores, K, dim=-1)  # type: ignore[return-value]


def test_scores_made_outside_the_child_that_picks() -> None:
    for arguments, score in (((X,), "softmax"), ((), None)):
        block = moe_runner.recognize(ScoredOutside(), arguments)
        assert block is not None
        assert (block.num_experts, block.score) == (E, score)


class ArgmaxBlock(Block):
    def scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        chosen = logits.argmax(dim=-1, keepdim=True)
        return logits.softmax(-1).gather(-1, chosen), chosen


def test_one_expert_by_argmax() -> None:
    block = moe_runner.recognize(ArgmaxBlock(), (X,))
    assert block is not None
    assert block.top_k == 1


class ListWithNulls(ListBlock):
    def __init__(self) -> None:
        super().__init__(gather=False)
        self.p = nn.Linear(H, E + 1)
        self.q.append(nn.Identity())


def test_a_list_with_an_expert_that_does_nothing() -> None:
    block = moe_runner.recognize(ListWithNulls(), (X,))
    assert block is not None
    assert (block.num_experts, block.storage, block.top_k) == (E, "module list", K)


class NullExperts(Block):
    """Two of six choices lead to no expert."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Linear(H, E + 2)


def test_more_scores_than_experts() -> None:
    block = moe_runner.recognize(NullExperts(), (X,))
    assert block is not None
    assert (block.num_experts, block.top_k, block.score) == (E, K, "softmax")


class Exploding(Block):
    def forward(self, x: Tensor) -> Any:
        if x.sum().item() > 0:
            raise ValueError("no")
        return super().forward(x)


def test_a_forward_that_stops_before_the_choice_falls_back_on_structure() -> None:
    block = moe_runner.recognize(Exploding(), (X,))
    assert block is not None
    assert block.called
    assert (block.num_experts, block.top_k) == (E, None)
    assert "4 experts, top-k not known, score function not known" in block.describe()
    assert "could be followed only to line" in block.evidence[0]
    assert "Exploding" in block.evidence[0]


def test_inputs_that_do_not_fit_the_forward_do_not_raise() -> None:
    block = moe_runner.recognize(Block(), (X, X, X))
    assert block is not None
    assert "could not be traced" in block.evidence[0]


def test_what_is_no_module_is_an_error_that_says_so() -> None:
    with pytest.raises(moe_runner.ModuleTypeError, match=r"found str, expected an nn\.Module"):
        moe_runner.recognize("model.layers.0.mlp")  # type: ignore[arg-type]
    assert issubclass(moe_runner.ModuleTypeError, moe_runner.MoeRunnerError)
