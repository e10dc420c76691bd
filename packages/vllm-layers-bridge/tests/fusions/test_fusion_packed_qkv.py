"""Query, key and value in one weight: spellings, near misses, text that does more, instances that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ast_rewrite import Refused
from torch import nn
from transformers.pytorch_utils import Conv1D
from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions import QKV, ModuleFacts, PackedQKV
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import QKVLinearSpec, Source

HIDDEN, HEADS, KV_HEADS, HEAD = 16, 4, 2, 8
Q, KV = HEADS * HEAD, KV_HEADS * HEAD
WIDTH = Q + 2 * KV
X = torch.empty(1, 5, HIDDEN, device="meta")


def attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What the leaf stands for: here, something that tells its operands and their heads apart."""
    out = attention_leaf(module, query, key, value)[0]
    if query.device.type == "meta":
        return out
    heads = [part.repeat_interleave(HEADS // part.shape[1], dim=1).transpose(1, 2) for part in (query, key, value)]
    return heads[0] + 2 * heads[1].cumsum(1) + 3 * heads[2].flip(-1)


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, WIDTH)
        self.out = nn.Linear(Q, HIDDEN)
        self.sizes = (Q, KV, KV)

    def _heads(self, part):
        return part.view(*part.shape[:2], -1, HEAD).transpose(1, 2)

    def _attend(self, query, key, value):
        out = attention(self, self._heads(query), self._heads(key), self._heads(value))
        return self.out(out.flatten(2))


class SplitWhole(_Base):
    def forward(self, x):
        query, key, value = self.qkv(x).split(self.sizes, dim=-1)
        return self._attend(query, key, value)


class TorchSplit(_Base):
    def forward(self, x):
        packed = self.qkv(x)
        query, key, value = torch.split(packed, [Q, KV, KV], dim=2)
        return self._attend(query, key, value)


class Sliced(_Base):
    def forward(self, x):
        packed = self.qkv(x)
        query = packed[..., :Q]
        key = packed[..., Q : Q + KV]
        value = packed[..., Q + KV :]
        return self._attend(query, key, value)


class SlicedOutOfOrder(_Base):
    def forward(self, x):
        packed = self.qkv(x)
        value = self._heads(packed[:, :, -KV:])
        key = self._heads(packed[:, :, Q:-KV])
        out = attention(self, self._heads(packed[:, :, :Q]), key, value)
        return self.out(out.flatten(2))


class Unsqueezed(_Base):
    def forward(self, x):
        query, key, value = self.qkv(x).unsqueeze(1).split(self.sizes, dim=3)
        return self._attend(query[:, 0], key[:, 0], value[:, 0])


class Clamped(_Base):
    def forward(self, x):
        packed = self.qkv(x)
        packed = packed.clamp(min=-0.5, max=0.5)
        query, key, value = packed.split(self.sizes, dim=2)
        return attention(self, self._heads(query), self._heads(key), self._heads(value))


class Transposed(SplitWhole):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = Conv1D(WIDTH, HIDDEN)


SPELLINGS = [SplitWhole, TorchSplit, Sliced, SlicedOutOfOrder, Unsqueezed, Transposed, Clamped]


@pytest.mark.parametrize("cls", SPELLINGS)
def test_the_weight_becomes_three_shards_and_the_cut_reads_the_sizes(
    fuse: Callable[..., Any], attention_facts: Callable[..., ModuleFacts], cls: type[nn.Module]
) -> None:
    fused = fuse(PackedQKV(), cls(), X, facts=attention_facts(HEADS, KV_HEADS, HEAD))
    assert fused.text.count(".split(self.qkv_sizes, dim=-1)") == 1
    assert fused.text.count("self.qkv(x)") == 1
    rows = ((0, Q), (Q, Q + KV), (Q + KV, WIDTH))
    transposed = cls is Transposed
    sources = tuple(Source("qkv", s, b - a, (a, b), transposed) for s, (a, b) in zip("qkv", rows, strict=True))
    assert fused.specs == (QKVLinearSpec("qkv", sources, HIDDEN, True, HEAD, HEAD, HEADS, KV_HEADS, "qkv_sizes"),)


@pytest.mark.parametrize("cls", SPELLINGS)
def test_the_rewritten_forward_computes_what_it_did_at_every_size(
    fuse: Callable[..., Any],
    attention_facts: Callable[..., ModuleFacts],
    cls: type[nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = cls().requires_grad_(False)
    inputs = [torch.randn(1, tokens, HIDDEN) for tokens in (1, 2, 9, 64)]
    expected = [module(x) for x in inputs]
    applied = fuse(PackedQKV(), module, X, facts=attention_facts(HEADS, KV_HEADS, HEAD)).apply_plain()
    for x, y in zip(inputs, expected, strict=True):
        torch.testing.assert_close(applied(x), y, rtol=1e-5, atol=1e-6)


class InterleavedByHead(_Base):
    def forward(self, x):
        packed = self.qkv(x).view(1, x.shape[1], 2, WIDTH // 2).transpose(1, 2)
        query, key, value = packed.split([Q // 2, KV // 2, KV // 2], dim=-1)
        return attention(self, query.transpose(1, 2).flatten(2)[:, None], key, value)


class KeyFirst(_Base):
    def forward(self, x):
        key, query, value = self.qkv(x).split([KV, Q, KV], dim=-1)
        return self._attend(query, key, value)


class Overlapping(_Base):
    def forward(self, x):
        packed = self.qkv(x)
        return self._attend(packed[..., :Q], packed[..., Q : Q + KV], packed[..., Q : Q + KV])


class WithAFourthPart(_Base):
    def forward(self, x):
        query, key, value, gate = self.qkv(x).split([Q - KV, KV, KV, KV], dim=-1)
        return self._attend(query, key, value) * gate.mean()


class PackedReadElsewhere(_Base):
    def forward(self, x):
        packed = self.qkv(x)
        query, key, value = packed.split(self.sizes, dim=-1)
        return self._attend(query, key, value) + packed.mean()


class QueryApart(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, Q)
        self.kv = nn.Linear(HIDDEN, 2 * KV)

    def forward(self, x):
        key, value = self.kv(x).chunk(2, dim=-1)
        return self._attend(self.q(x), key, value)


class PackedCalledTwice(_Base):
    def forward(self, x):
        query, key, value = self.qkv(self.out(self.qkv(x)[..., :Q])).split(self.sizes, dim=-1)
        return self._attend(query, key, value)


class ModifiedFirst(_Base):
    def forward(self, x):
        query, key, value = (self.qkv(x) * 2).split(self.sizes, dim=-1)
        return self._attend(query, key, value)


class ClampedToOtherFeatures(_Base):
    def forward(self, x):
        packed = self.qkv(x)
        query, key, value = packed.clamp(max=packed.mean(-1, keepdim=True)).split(self.sizes, dim=-1)
        return attention(self, self._heads(query), self._heads(key), self._heads(value))


class NumberForAQuery(_Base):
    def forward(self, x):
        _, key, value = self.qkv(x).split(self.sizes, dim=-1)
        return attention(self, 1, self._heads(key), self._heads(value))


NEAR = [
    (ClampedToOtherFeatures, "its rows are interleaved, or not cut along the last axis"),
    (NumberForAQuery, "its rows are interleaved, or not cut along the last axis"),
    (InterleavedByHead, "its rows are interleaved, or not cut along the last axis"),
    (KeyFirst, "they are 16 to 48, 0 to 16, 48 to 64 of 64 features, expected one after the other"),
    (Overlapping, "expected one after the other"),
    (WithAFourthPart, "expected one after the other"),
    (PackedReadElsewhere, "is used in another way too"),
    (QueryApart, "query, key and value come from `kv`, `q`, expected one linear"),
    (PackedCalledTwice, "`qkv` is called 2 times"),
    (ModifiedFirst, "its rows are interleaved, or not cut along the last axis"),
]


@pytest.mark.parametrize(("cls", "reason"), NEAR, ids=lambda value: getattr(value, "__name__", ""))
def test_near_miss_says_in_words_why_not(miss_of: Callable[..., Any], cls: type[nn.Module], reason: str) -> None:
    assert reason in miss_of(PackedQKV(), cls(), X).reason


def test_packed_and_apart_are_candidates_of_one_fusion_each(traced: Callable[..., Any]) -> None:
    for cls, fusion, other in ((InterleavedByHead, PackedQKV(), QKV()), (QueryApart, QKV(), PackedQKV())):
        seen = traced(cls(), X)
        assert fusion.is_candidate(seen)
        assert not other.is_candidate(seen)


class CutBySampleSize(_Base):
    def forward(self, x):
        query, key, value = self.qkv(x).split(self.sizes, dim=-1)
        if x.shape[1] > 100:
            value = key
        return self._attend(query, key, value)


class CutInAHelper(_Base):
    def _cut(self, packed):
        return packed.split(self.sizes, dim=-1)

    def forward(self, x):
        query, key, value = self._cut(self.qkv(x))
        return self._attend(query, key, value)


@pytest.mark.parametrize(
    ("cls", "reason"), [(CutBySampleSize, "may take another path"), (CutInAHelper, "made in `_cut`")]
)
def test_text_that_does_more_than_the_graph_shows_is_refused(
    fuse: Callable[..., Any], attention_facts: Callable[..., ModuleFacts], cls: type[nn.Module], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        fuse(PackedQKV(), cls(), X, facts=attention_facts(HEADS, KV_HEADS, HEAD))


@pytest.mark.parametrize(
    ("change", "heads", "reason"),
    [
        (lambda m: None, (4, 4, 8), "gives \\(32, 16, 16\\) features and its attention takes \\(32, 32, 32\\)"),
        (lambda m: setattr(m, "qkv", nn.Linear(HIDDEN, 2 * WIDTH)), (4, 2, 8), "the one that was traced"),
        (lambda m: setattr(m, "qkv", Conv1D(WIDTH, HIDDEN)), (4, 2, 8), "the one that was traced"),
        (lambda m: setattr(m, "qkv_sizes", None), (4, 2, 8), "attribute `qkv_sizes` already"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_instance_that_differs_is_not_fused(
    traced: Callable[..., Any],
    attention_facts: Callable[..., ModuleFacts],
    change: Callable[[nn.Module], None],
    heads: tuple[int, int, int],
    reason: str,
) -> None:
    match = PackedQKV().match(traced(SplitWhole(), X))
    other = SplitWhole()
    change(other)
    with pytest.raises(NotFusable, match=reason):
        PackedQKV().check(match, other, attention_facts(*heads))


def test_a_module_that_calls_attention_twice_is_not_fused(
    traced: Callable[..., Any], attention_facts: Callable[..., ModuleFacts]
) -> None:
    match = PackedQKV().match(traced(SplitWhole(), X))
    (spec,) = attention_facts(HEADS, KV_HEADS, HEAD).attention
    with pytest.raises(NotFusable, match="calls attention 2 times"):
        PackedQKV().check(match, SplitWhole(), ModuleFacts("twice", (spec, spec)))
