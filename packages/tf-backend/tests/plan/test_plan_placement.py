"""Placement of one module over tensor-parallel ranks: what is split, what stays whole and why."""

from __future__ import annotations

import fx_match
import pytest
import torch
from fx_match import LeafCall
from tf_backend.plan.placement import OwnShard, Part, Styles, Unplaced, place
from torch import nn
from vllm_layers_bridge.seams.leaf import attention_leaf

HIDDEN, INNER = 8, 12


def placed(module: nn.Module, ranks: int = 2, heads: tuple[tuple[int, int], ...] = ()) -> Styles:
    inputs = (torch.empty(1, 5, HIDDEN, device="meta"),)
    return place(fx_match.trace(module.to("meta"), inputs, leaves=[LeafCall(attention_leaf)]), ranks, heads)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, INNER)
        self.second = nn.Linear(INNER, HIDDEN)
        self.scale = nn.Parameter(torch.ones(INNER))
        self.norm = nn.LayerNorm(INNER)


class Plain(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)) * 2.0)


class ScaledPerFeature(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.scale)


class NormedAcross(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


class Softmaxed(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).softmax(-1))


class ReadsTheSize(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)
        return self.second(inner / inner.shape[-1])


class BranchesOnTheSize(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)
        return self.second(inner if inner.shape[-1] > 8 else inner * 2.0)


class BranchesOnTheTokens(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)
        return self.second(inner) if x.shape[1] > 1 else self.second(inner + self.first.weight.mean())


class ScaledTwice(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.scale) * self.scale.sum()


class WritesWhole(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)
        room = x.new_empty(1, 5, INNER)
        room.copy_(inner)
        return self.second(room)


class WritesItsOwn(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)
        room = x.new_empty(*x.shape[:-1], inner.shape[-1])
        room.copy_(inner)
        return self.second(room)


class MergesWithTokens(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).transpose(1, 2).reshape(1, 5, -1))


class LowRank(nn.Module):
    """A projection through a normed bottleneck: what lies before the norm stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(HIDDEN, 4)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, INNER)
        self.out = nn.Linear(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.up(self.norm(self.down(x)))))


class ReturnsInner(TwoLayers):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = self.first(x)
        return self.second(inner), inner


class Unpaired(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).sum(-1, keepdim=True) + x


class SlicesFeatures(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)
        return self.second(torch.cat((inner[..., :4], inner[..., 4:]), dim=-1))


class PackedHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(HIDDEN, 2 * INNER)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.both(x)
        return self.down(both[..., :INNER] * torch.tanh(both[..., INNER:]))


class WritesInPlace(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)
        inner[..., 0] = 0.0
        return self.second(inner)


def test_a_pair_of_linears_is_split_on_outputs_then_on_inputs() -> None:
    styles = placed(Plain())
    assert (styles.column, styles.row) == ({"first"}, {"second"})


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (NormedAcross, "is a norm over all the features"),
        (Softmaxed, "(softmax) is over the axis"),
        (ReadsTheSize, "reads the size of an axis"),
        (BranchesOnTheSize, "its path hangs on"),
        (BranchesOnTheTokens, "its path hangs on"),
        (ScaledTwice, "with `scale`, which is whole"),
        (WritesWhole, "writes in place a value that would be split into one that is whole"),
        (MergesWithTokens, "in a way that does not keep its parts"),
        (ReturnsInner, "it returns"),
        (Unpaired, "(sum)"),
        (SlicesFeatures, "takes parts of a value along the axis"),
        (WritesInPlace, "writes in place to parts"),
    ],
)
def test_what_cannot_be_proved_is_not_split(module: type[nn.Module], reason: str) -> None:
    with pytest.raises(Unplaced) as caught:
        placed(module())
    assert reason in str(caught.value)


def test_a_parameter_beside_the_features_is_split_with_them() -> None:
    styles = placed(ScaledPerFeature())
    assert styles.parameters == {"scale": OwnShard(0, 2)}


def test_what_feeds_a_norm_over_all_features_stays_whole() -> None:
    styles = placed(LowRank())
    assert (styles.whole, styles.column, styles.row) == ({"down"}, {"up"}, {"out"})


def test_memory_of_a_ranks_own_size_may_be_written() -> None:
    assert placed(WritesItsOwn()).row == {"second"}


def test_parts_of_one_weight_are_split_each_for_itself() -> None:
    module = PackedHalves().to("meta")
    traced = fx_match.trace(module, (torch.empty(1, 5, HIDDEN, device="meta"),))
    styles = place(traced, 2, (), {"both": (Part(0, INNER, 2), Part(INNER, 2 * INNER, 2))})
    assert (styles.column, styles.row) == ({"both"}, {"down"})
    with pytest.raises(Unplaced, match="other parts"):
        place(traced, 2, (), {"both": (Part(0, 4, 2), Part(4, 2 * INNER, 2))})


def test_ranks_that_do_not_divide_the_features() -> None:
    with pytest.raises(Unplaced, match="5 ranks do not divide"):
        placed(Plain(), ranks=5)


class TwoCalls(nn.Module):
    """Attends twice and sums: each call is split by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def values(self, v: torch.Tensor) -> torch.Tensor:
        return v * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (proj(x).view(1, 5, -1, 2).transpose(1, 2) for proj in (self.q, self.k, self.v))
        one, two = attention_leaf(self, q, k, v)[0], attention_leaf(self, q, k, self.values(v))[0]
        return self.out((one - two).reshape(1, 5, -1))


class TwoHalves(TwoCalls):
    """As differential attention does it: values of other heads, which are on another rank."""

    def values(self, v: torch.Tensor) -> torch.Tensor:
        first, second = v.chunk(2, dim=1)
        return torch.cat((second, first), dim=1)


def test_several_calls_of_attention_are_split_by_heads_alike() -> None:
    styles = placed(TwoCalls(), heads=((4, 4), (4, 4)))
    assert (styles.column, styles.row) == ({"q", "k", "v"}, {"out"})


def test_calls_that_take_heads_of_other_ranks_are_refused() -> None:
    with pytest.raises(Unplaced, match="chunk"):
        placed(TwoHalves(), heads=((4, 4), (4, 4)))


class RepeatsOneHead(nn.Module):
    """One rotary part for all heads, as latent attention has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.second = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.first(x).view(1, 5, -1, 2)
        part = x[:, :, None, :2].expand(1, 5, heads.shape[2], 2)
        return self.second(torch.cat((heads, part), dim=-1).reshape(1, 5, -1))


def test_a_whole_value_is_repeated_for_the_heads_of_a_rank() -> None:
    assert placed(RepeatsOneHead()).row == {"second"}


class SumsWhatSeveralHold(nn.Module):
    """Key-value heads that go straight into the output projection: several ranks would add the same."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = nn.Linear(HIDDEN, 4)
        self.out = nn.Linear(4, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.kv(x)))


def test_what_several_ranks_hold_is_not_summed_over_them() -> None:
    traced = fx_match.trace(SumsWhatSeveralHold().to("meta"), (torch.empty(1, 5, HIDDEN, device="meta"),))
    with pytest.raises(Unplaced, match="would sum over ranks what several of them hold"):
        place(traced, 4, (), {"kv": (Part(0, 4, 2),)})
