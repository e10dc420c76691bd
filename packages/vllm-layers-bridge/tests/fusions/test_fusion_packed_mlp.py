"""A gated MLP with gate and up in one weight: spellings, near misses, text that does more, instances that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ast_rewrite import Refused
from torch import nn
from transformers.pytorch_utils import Conv1D
from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions import ModuleFacts, PackedGatedMLP
from vllm_layers_bridge.specs import ActivationAndMulSpec, MergedLinearSpec, Source

HIDDEN, WIDTH = 8, 12
X = torch.empty(1, 3, HIDDEN, device="meta")


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(HIDDEN, 2 * WIDTH)
        self.down = nn.Linear(WIDTH, HIDDEN)
        self.act = nn.SiLU()
        self.width = WIDTH


class Chunked(_Base):
    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class NameTakenAgain(_Base):
    def forward(self, x):
        x = self.fc(x)
        gate, x = x.chunk(2, dim=-1)
        x = x * self.act(gate)
        return self.down(x)


class Split(_Base):
    def forward(self, x):
        packed = self.fc(x)
        gate, up = torch.split(packed, self.width, dim=2)
        return self.down(up * F.silu(gate))


class SplitBySizes(_Base):
    def forward(self, x):
        gate, up = self.fc(x).split([self.width, self.width], -1)
        gate = self.act(gate)
        hidden = gate * up
        return self.down(hidden)


class Sliced(_Base):
    def forward(self, x):
        packed = self.fc(x)
        half = packed.shape[-1] // 2
        return self.down(self.act(packed[..., :half]) * packed[..., half:])


class SlicedInStatements(_Base):
    def forward(self, x):
        packed = self.fc(x)
        gate = packed[:, :, : self.width]
        up = packed[:, :, self.width :]
        gate = F.silu(gate)
        return self.down(gate * up)


class UpFirst(_Base):
    def forward(self, x):
        up, gate = self.fc(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class NamedParts(_Base):
    def forward(self, x):
        parts = self.fc(x).chunk(2, dim=-1)
        gate = parts[0]
        up = parts[-1]
        gated = self.act(gate)
        return self.down(gated * up)


class PartsOneByOne(_Base):
    def forward(self, x):
        parts = self.fc(x).chunk(2, dim=-1)
        gate = parts[0]
        second = parts[1]
        up = second
        gated = self.act(gate)
        return self.down(gated * up)


class Rest(_Base):
    def forward(self, x):
        gate, *rest = self.fc(x).split(self.width, -1)
        up = rest[0]
        return self.down(self.act(gate) * up)


class Transposed(Chunked):
    def __init__(self) -> None:
        super().__init__()
        self.fc = Conv1D(2 * WIDTH, HIDDEN)


HANDED_ON = [NamedParts, PartsOneByOne, Rest]
SPELLINGS = [Chunked, NameTakenAgain, Split, SplitBySizes, Sliced, SlicedInStatements, UpFirst, Transposed, *HANDED_ON]


@pytest.mark.parametrize("cls", SPELLINGS)
def test_the_product_becomes_one_call_and_the_weight_two_shards(fuse: Callable[..., Any], cls: type[nn.Module]) -> None:
    fused = fuse(PackedGatedMLP(), cls(), X)
    assert "self.act_and_mul(" in fused.text
    for gone in ("self.act(", "F.silu", "chunk", "split", "[..., :", "[:, :, ", "parts", "rest"):
        assert gone not in fused.text
    first, second = (0, WIDTH), (WIDTH, 2 * WIDTH)
    gate, up = (second, first) if cls is UpFirst else (first, second)
    transposed = cls is Transposed
    assert fused.specs == (
        MergedLinearSpec(
            "fc",
            (Source("fc", 0, WIDTH, gate, transposed), Source("fc", 1, WIDTH, up, transposed)),
            HIDDEN,
            bias=True,
        ),
        ActivationAndMulSpec("act_and_mul", "silu"),
    )


@pytest.mark.parametrize("cls", SPELLINGS)
def test_the_rewritten_forward_computes_what_it_did_at_every_size(
    fuse: Callable[..., Any], cls: type[nn.Module]
) -> None:
    module = cls().requires_grad_(False)
    inputs = [torch.randn(1, tokens, HIDDEN) for tokens in (1, 2, 9, 24)]
    expected = [module(x.clone()) for x in inputs]
    applied = fuse(PackedGatedMLP(), module, X).apply_plain()
    for x, y in zip(inputs, expected, strict=True):
        torch.testing.assert_close(applied(x.clone()), y, rtol=1e-5, atol=1e-6)


class Relu(_Base):
    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.down(F.relu(gate) * up)


class UnevenParts(_Base):
    def forward(self, x):
        packed = self.fc(x)
        return F.silu(packed[..., :10]) * packed[..., 12:22]


class SameHalfTwice(_Base):
    def forward(self, x):
        gate, _ = self.fc(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * gate)


class EveryOtherFeature(_Base):
    def forward(self, x):
        packed = self.fc(x)
        return self.down(self.act(packed[..., ::2]) * packed[..., 1::2])


class HalvesOfTheTokens(_Base):
    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=1)
        return self.act(gate) * up


class HalfReadTwice(_Base):
    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up) + up.sum()


class PackedReadTwice(_Base):
    def forward(self, x):
        packed = self.fc(x)
        gate, up = packed.chunk(2, dim=-1)
        return self.down(self.act(gate) * up) + packed.mean()


class CalledTwice(_Base):
    def forward(self, x):
        gate, up = self.fc(self.down(self.fc(x)[..., :12])).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class ClampBetween(_Base):
    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.down(self.act(gate.clamp(max=7.0)) * up)


class CutBySampleSize(_Base):
    def forward(self, x):
        packed = self.fc(x)
        cut = x.shape[1] * 4
        return self.down(self.act(packed[..., :cut]) * packed[..., cut:])


NO_PARTS = "does not multiply one part"
NEAR = [
    (Relu, "the activation is relu; vLLM's fused layers have gelu, gelu_tanh, silu"),
    (UnevenParts, "takes 0 to 10 and 12 to 22 of 24 features, expected the two halves"),
    (SameHalfTwice, "expected the two halves"),
    (EveryOtherFeature, NO_PARTS),
    (HalvesOfTheTokens, NO_PARTS),
    (HalfReadTwice, "is used outside of the product too"),
    (PackedReadTwice, "is used outside of the product too"),
    (CalledTwice, "`fc` is called 2 times"),
    (ClampBetween, NO_PARTS),
    (CutBySampleSize, NO_PARTS),
]


@pytest.mark.parametrize(("cls", "reason"), NEAR, ids=lambda value: getattr(value, "__name__", ""))
def test_near_miss_says_in_words_why_not(miss_of: Callable[..., Any], cls: type[nn.Module], reason: str) -> None:
    assert reason in miss_of(PackedGatedMLP(), cls(), X).reason


def test_only_products_of_parts_are_candidates(traced: Callable[..., Any]) -> None:
    fusion = PackedGatedMLP()
    assert fusion.is_candidate(traced(Relu(), X))
    assert not fusion.is_candidate(traced(ClampBetween(), X))


class BranchBySize(_Base):
    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=-1)
        if x.shape[1] > 100:
            gate = up
        return self.down(self.act(gate) * up)


class InAHelper(_Base):
    def _cut(self, packed):
        return packed.chunk(2, dim=-1)

    def forward(self, x):
        gate, up = self._cut(self.fc(x))
        return self.down(self.act(gate) * up)


class GateKept(_Base):
    verbose = False

    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=-1)
        if self.verbose:
            print(gate)
        return self.down(self.act(gate) * up)


class PartKept(_Base):
    def forward(self, x):
        parts = self.fc(x).chunk(2, dim=-1)
        gate = parts[0]
        up = kept = parts[1]
        self.kept = kept
        return self.down(self.act(gate) * up)


class PartsPassedOn(_Base):
    def forward(self, x):
        parts = self.fc(x).chunk(2, dim=-1)
        gate = parts[0]
        up = parts[1]
        out = self.down(self.act(gate) * up)
        return (out, len(parts))


class InPlace(_Base):
    def forward(self, x):
        gate, up = self.fc(x).chunk(2, dim=-1)
        hidden = self.act(gate)
        hidden *= up
        return self.down(hidden)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (BranchBySize, "may take another path"),
        (InAHelper, "made in `_cut`"),
        (GateKept, "gate, which the deleted statement binds, is still read"),
        (PartKept, "kept, which the deleted statement binds, is still read"),
        (PartsPassedOn, "parts, which the deleted statement binds, is still read"),
        (InPlace, ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_text_that_does_more_than_the_graph_shows_is_refused(
    fuse: Callable[..., Any], cls: type[nn.Module], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        fuse(PackedGatedMLP(), cls(), X)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m, "fc", nn.Linear(HIDDEN, 4 * WIDTH)), "the one that was traced"),
        (lambda m: setattr(m, "fc", Conv1D(2 * WIDTH, HIDDEN)), "the one that was traced"),
        (lambda m: setattr(m, "fc", nn.Identity()), "`fc` is a Identity"),
        (lambda m: m.fc.register_forward_hook(lambda *_: None), "no plain linear"),
        (lambda m: delattr(m, "fc"), "no child `fc`"),
        (lambda m: setattr(m, "act", nn.ReLU()), "its activation is relu"),
        (lambda m: setattr(m, "act_and_mul", None), "attribute `act_and_mul` already"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_instance_that_differs_is_not_fused(
    traced: Callable[..., Any], change: Callable[[nn.Module], None], reason: str
) -> None:
    match = PackedGatedMLP().match(traced(Chunked(), X))
    other = Chunked()
    change(other)
    with pytest.raises(NotFusable, match=reason):
        PackedGatedMLP().check(match, other, ModuleFacts("other"))
