"""Recognition on small blocks of every shape, and on modules that look like one and are none."""

from __future__ import annotations

import copy
from typing import Any

import moe_runner
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

E, K, H, I = 4, 2, 16, 24  # noqa: E741 - experts, top-k, hidden, intermediate
X = torch.empty(1, 37, H, device="meta")


class Mlp(nn.Module):
    def __init__(self, intermediate: int = I) -> None:
        super().__init__()
        self.one = nn.Linear(H, intermediate)
        self.two = nn.Linear(intermediate, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.silu(self.one(x)))


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
        return torch.topk(logits.softmax(-1), K)  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Any:
        flat = x.view(-1, H)
        weights, chosen = self.scores(self.p(flat))
        return self.q(flat, chosen, weights).view(x.shape)


def test_a_plain_block() -> None:
    block = moe_runner.recognize(Block(), (X,))
    assert block is not None
    assert block.describe() == "4 experts, top 2, softmax before top-k, experts as stacked parameters `q.a`"
    assert (block.experts, block.parameters, block.shared_experts) == ("q", ("q.a", "q.b"), None)
    assert block.returns_router_logits is False
    assert block.evidence[0] == "experts: `q.a` [4, 24, 16], `q.b` [4, 16, 24]"
    assert "test_recognize:" in block.evidence[1]
    assert block.evidence[1].endswith("return torch.topk(logits.softmax(-1), K)  # type: ignore[return-value]")


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


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(E, H))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, chosen = torch.sort(F.linear(x, self.w).sigmoid(), dim=-1, descending=True)
        return values[:, :K], chosen[:, :K]


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


def test_a_functional_block_holds_its_experts_itself() -> None:
    for arguments in ((X,), ()):
        block = moe_runner.recognize(FunctionalBlock(), arguments)
        assert block is not None
        assert (block.experts, block.parameters, block.num_experts) == ("", ("up", "down"), E)
    called = moe_runner.recognize(FunctionalBlock(), (X,))
    assert called is not None
    assert (called.top_k, called.score, called.score_order) == (K, "softmax", "after")


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


class Layer(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.norm = nn.LayerNorm(H)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(self.norm(x))


def test_only_the_innermost_module_is_the_block() -> None:
    model = nn.Sequential(Layer(Block()), Layer(ListBlock(True)))
    for arguments in ((X,), ()):
        found = [name for name, module in model.named_modules() if moe_runner.recognize(module, arguments)]
        assert [name for name in found if name.endswith("block")] == ["0.block", "1.block"] == found


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


def test_parameters_without_a_shape_do_not_raise() -> None:
    assert moe_runner.recognize(nn.Sequential(nn.LazyLinear(3), Router()), (X,)) is None


def test_what_is_no_module_is_an_error_that_says_so() -> None:
    with pytest.raises(moe_runner.ModuleTypeError, match=r"found str, expected an nn\.Module"):
        moe_runner.recognize("model.layers.0.mlp")  # type: ignore[arg-type]
    assert issubclass(moe_runner.ModuleTypeError, moe_runner.MoeRunnerError)


def test_modules_with_nothing_to_choose_are_left_untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr("moe_runner._recognize.trace", fail)
    for module in (Mlp(), nn.Sequential(Mlp(), Mlp()), Layer(Mlp()), nn.ModuleList([Mlp(), Mlp()]), Router()):
        assert moe_runner.recognize(module, (X,)) is None
    with pytest.raises(AssertionError, match="traced"):
        moe_runner.recognize(Block(), (X,))
    assert moe_runner.recognize(Layer(Block()), (X,)) is None
