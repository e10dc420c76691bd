"""Attention that is near and does not fuse: the reason in words, refused text, and instances that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ast_rewrite import Refused
from torch import nn
from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions import QKV, ModuleFacts
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import AttentionSpec

HIDDEN, HEADS, KV_HEADS, DIM = 8, 4, 2, 6
X = torch.empty(1, 5, HIDDEN, device="meta")
COS = torch.empty(1, 5, DIM, device="meta")


def rotate(query, key, cos, sin):
    return query * cos.unsqueeze(1) + query * sin.unsqueeze(1), key * cos.unsqueeze(1) + key * sin.unsqueeze(1)


class _Base(nn.Module):
    bias: tuple[bool, bool, bool] = (False, False, False)

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = DIM
        self.q_proj = nn.Linear(HIDDEN, HEADS * DIM, bias=self.bias[0])
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * DIM, bias=self.bias[1])
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * DIM, bias=self.bias[2])
        self.o_proj = nn.Linear(HEADS * DIM, HIDDEN, bias=False)
        self.q_norm, self.k_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)

    def heads(self, x):
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def attend(self, query, key, value):
        output, _ = attention_leaf(self, query, key, value, None, scaling=1.0)
        return self.o_proj(output.reshape(1, output.shape[1], -1))


class PlainAttention(_Base):
    def forward(self, hidden_states, cos, sin):
        query = self.heads(self.q_proj(hidden_states))
        key = self.heads(self.k_proj(hidden_states))
        value = self.heads(self.v_proj(hidden_states))
        query, key = rotate(query, key, cos, sin)
        return self.attend(query, key, value)


class CrossAttention(_Base):
    def forward(self, hidden_states, cos, sin):
        q, k, v = self.q_proj(hidden_states), self.k_proj(cos), self.v_proj(cos)
        return self.attend(self.heads(q), self.heads(k), self.heads(v))

    def __init__(self) -> None:
        super().__init__()
        self.k_proj, self.v_proj = nn.Linear(DIM, KV_HEADS * DIM), nn.Linear(DIM, KV_HEADS * DIM)


class KeyIsValue(_Base):
    def forward(self, hidden_states, cos, sin):
        q, k = self.q_proj(hidden_states), self.k_proj(hidden_states)
        return self.attend(self.heads(q), self.heads(k), self.heads(k))


class SharedKeys(_Base):
    def forward(self, hidden_states, shared_key, shared_value):
        q = self.q_proj(hidden_states)
        return self.attend(self.heads(q), self.heads(shared_key), self.heads(shared_value))


class KeyCalledTwice(_Base):
    def forward(self, hidden_states, cos, sin):
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        return self.attend(self.heads(q), self.heads(k), self.heads(v)) + self.k_proj(hidden_states + 1).sum()


class QueryOfTwo(_Base):
    def forward(self, hidden_states, cos, sin):
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        q = q + torch.cat((k, v), -1)
        return self.attend(self.heads(q), self.heads(k), self.heads(v))


class InputRebound(_Base):
    def forward(self, hidden_states, cos, sin):
        q = self.q_proj(hidden_states)
        hidden_states = hidden_states * 2
        k, v = self.k_proj(hidden_states), self.v_proj(hidden_states)
        return self.attend(self.heads(q), self.heads(k), self.heads(v))


class InputWritten(_Base):
    def forward(self, hidden_states, cos, sin):
        q, k = self.q_proj(hidden_states), self.k_proj(hidden_states)
        hidden_states.mul_(2)
        v = self.v_proj(hidden_states)
        return self.attend(self.heads(q), self.heads(k), self.heads(v))


class InputWrittenInHelper(_Base):
    def double(self, x):
        x.mul_(2)
        return x

    def forward(self, hidden_states, cos, sin):
        q, k = self.q_proj(hidden_states), self.k_proj(hidden_states)
        self.double(hidden_states)
        v = self.v_proj(hidden_states)
        return self.attend(self.heads(q), self.heads(k), self.heads(v))


class OutputWritten(_Base):
    def forward(self, hidden_states, cos, sin):
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        view = q.view(1, -1, HEADS, DIM)
        view.mul_(DIM**-0.5)
        return self.attend(self.heads(q), self.heads(k), self.heads(v))


class BiasRead(_Base):
    def forward(self, hidden_states, cos, sin):
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        return self.attend(self.heads(q), self.heads(k), self.heads(v)) + self.v_proj.weight.sum()


class LowRankQuery(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.q_a = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden_states, cos, sin):
        q, k, v = self.q_proj(self.q_a(hidden_states)), self.k_proj(hidden_states), self.v_proj(hidden_states)
        return self.attend(self.heads(q), self.heads(k), self.heads(v))


MISSES = [
    (CrossAttention, "`k_proj` reads another input than `q_proj`"),
    (KeyIsValue, "key and value both come from `k_proj`, expected three linears"),
    (SharedKeys, "the key comes from no linear of this module: it is shared from elsewhere, or packed"),
    (KeyCalledTwice, "`k_proj` is called 2 times"),
    (QueryOfTwo, "the query is computed from 3 linears"),
    (InputRebound, "`k_proj` reads another input than `q_proj`"),
    (InputWritten, "`v_proj` reads another input than `q_proj`"),
    (InputWrittenInHelper, "`v_proj` reads another input than `q_proj`"),
    (OutputWritten, "the output of `q_proj` is written to in place"),
    (BiasRead, "the forward reads `v_proj.weight` beside calling `v_proj`"),
    (LowRankQuery, "`k_proj` reads another input than `q_proj`"),
]


@pytest.mark.parametrize(("cls", "reason"), MISSES, ids=lambda value: getattr(value, "__name__", ""))
def test_near_miss_says_in_words_why_not_and_where(
    miss_of: Callable[..., Any], traced: Callable[..., Any], cls: type[nn.Module], reason: str
) -> None:
    key = torch.empty(1, 5, KV_HEADS * DIM, device="meta")
    args = (X.clone(), key, key) if cls is SharedKeys else (X.clone(), COS, COS)
    miss = miss_of(QKV(), cls(), *args)
    assert reason in miss.reason
    assert miss.node is not None
    assert QKV().is_candidate(traced(cls(), *args)) is (cls is not SharedKeys)


class Packed(_Base):
    def forward(self, hidden_states, cos, sin):
        q, k, v = self.q_proj(hidden_states).chunk(3, dim=-1)
        return self.attend(*(part.view(1, -1, 1, HEADS * DIM // 3).transpose(1, 2) for part in (q, k, v)))


def test_a_packed_projection_is_no_loss(miss_of: Callable[..., Any], traced: Callable[..., Any]) -> None:
    assert "query and key both come from `q_proj`" in miss_of(QKV(), Packed(), X, COS, COS).reason
    assert not QKV().is_candidate(traced(Packed(), X, COS, COS))


def test_without_attention_there_is_nothing_to_fuse(miss_of: Callable[..., Any], traced: Callable[..., Any]) -> None:
    module = nn.Sequential(nn.Linear(HIDDEN, HIDDEN))
    assert "does not call the attention interface" in miss_of(QKV(), module, X).reason
    assert not QKV().is_candidate(traced(module, X))


def rotate_unless_long(x, cos):
    if x.shape[2] > 1000:
        x.mul_(0)
    return x * cos.unsqueeze(1)


class HelperAsksForSize(_Base):
    def forward(self, hidden_states, cos, sin):
        query = rotate_unless_long(self.heads(self.q_proj(hidden_states)), cos)
        key = rotate_unless_long(self.heads(self.k_proj(hidden_states)), cos)
        value = self.heads(self.v_proj(hidden_states))
        return self.attend(query, key, value)


class ProjectedInHelper(_Base):
    def project(self, x):
        return self.heads(self.q_proj(x) * 2)

    def forward(self, hidden_states, cos, sin):
        q = self.project(hidden_states)
        k, v = self.k_proj(hidden_states), self.v_proj(hidden_states)
        return self.attend(q, self.heads(k), self.heads(v))


class BlockOfAnArgument(_Base):
    def forward(self, hidden_states, cos, sin):
        q = self.q_proj(hidden_states)
        if cos is not None:
            k = self.k_proj(hidden_states)
            v = self.v_proj(hidden_states)
        return self.attend(self.heads(q), self.heads(k), self.heads(v))


class BlockOfAChangingAttribute(_Base):
    shared = False

    def forward(self, hidden_states, cos, sin):
        q = self.q_proj(hidden_states)
        if not self.shared:
            k = self.k_proj(hidden_states)
            v = self.v_proj(hidden_states)
        self.shared = False
        return self.attend(self.heads(q), self.heads(k), self.heads(v))


class BlockOfASize(_Base):
    shared = False

    def forward(self, hidden_states, cos, sin):
        q = self.q_proj(hidden_states)
        if not self.shared and q.shape[1] > 1:
            k = self.k_proj(hidden_states)
            v = self.v_proj(hidden_states)
        if q.shape[1] > 1000:
            return q
        return self.attend(self.heads(q), self.heads(k), self.heads(v))


class ValueAskedFor(_Base):
    def forward(self, hidden_states, cos, sin):
        q, k = self.q_proj(hidden_states), self.k_proj(hidden_states)
        v = self.v_proj(hidden_states)
        v = v if self.v_proj else k
        return self.attend(self.heads(q), self.heads(k), self.heads(v))


class GivenAFlag(_Base):
    """Whether it attends to other states hangs on something that is bound again."""

    def forward(self, hidden_states, cos, sin, other_states=None):
        is_cross = other_states is not None
        if hidden_states.shape[1] == 1:
            is_cross = True
        query = self.heads(self.q_proj(hidden_states))
        current = cos if is_cross else hidden_states
        return self.attend(query, self.heads(self.k_proj(current)), self.heads(self.v_proj(current)))


class InputBoundAgain(_Base):
    def forward(self, hidden_states, cos, sin, other_states=None):
        query = self.heads(self.q_proj(hidden_states))
        current = hidden_states if other_states is None else cos
        if hidden_states.shape[1] == 1:
            hidden_states = hidden_states + 1
        return self.attend(query, self.heads(self.k_proj(current)), self.heads(self.v_proj(current)))


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (GivenAFlag, "current may not have the same value: current is bound again"),
        (InputBoundAgain, "hidden_states may not have the same value: hidden_states is bound again"),
        (ProjectedInHelper, "made in `project`"),
        (HelperAsksForSize, "rotate_unless_long is not known to leave its arguments alone"),
        (BlockOfAnArgument, "do not lie in one block"),
        (BlockOfAChangingAttribute, "do not lie in one block"),
        (BlockOfASize, "do not lie in one block"),
        (ValueAskedFor, "uses `self.v_proj` beside calling it"),
    ],
)
def test_text_that_does_more_than_the_graph_shows_is_refused(
    fuse: Callable[..., Any], attention_facts: Callable[..., ModuleFacts], cls: type[nn.Module], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        fuse(QKV(), cls(), X, COS, COS, facts=attention_facts(HEADS, KV_HEADS, DIM))


SPEC = AttentionSpec(HEADS, KV_HEADS, DIM, DIM, 1.0)


def _change(name: str, value: object) -> Callable[[nn.Module], None]:
    return lambda module: setattr(module, name, value)


OTHERS = [
    ((), _change("x", 0), "it calls attention 0 times"),
    ((SPEC, AttentionSpec(HEADS, HEADS, DIM, DIM, 1.0)), _change("x", 0), "it calls attention 2 times"),
    ((AttentionSpec(HEADS, HEADS, DIM, DIM, 1.0),), _change("x", 0), r"give \(24, 12, 12\) .* takes \(24, 24, 24\)"),
    ((SPEC,), _change("q_proj", nn.Linear(HIDDEN, 2 * HEADS * DIM)), r"give \(48, 12, 12\) features"),
    ((SPEC,), _change("k_proj", nn.Linear(HIDDEN, KV_HEADS * DIM)), "k_proj has a bias and q_proj and v_proj has none"),
    ((SPEC,), lambda m: setattr(m, "v_proj", m.k_proj), "not distinct layers"),
    ((SPEC,), lambda m: setattr(m.v_proj, "weight", m.k_proj.weight), "share a tensor"),
    ((SPEC,), _change("v_proj", nn.Identity()), "`v_proj` is a Identity"),
    ((SPEC,), _change("qkv_proj", None), "attribute `qkv_proj` already"),
    ((SPEC,), _change("qkv_sizes", None), "attribute `qkv_sizes` already"),
]


@pytest.mark.parametrize(("attention", "change", "reason"), OTHERS, ids=[case[2] for case in OTHERS])
def test_an_instance_that_differs_is_not_fused(
    traced: Callable[..., Any], attention: tuple[Any, ...], change: Callable[[nn.Module], None], reason: str
) -> None:
    match = QKV().match(traced(PlainAttention(), X, COS, COS))
    module = PlainAttention()
    change(module)
    with pytest.raises(NotFusable, match=reason):
        QKV().check(match, module, ModuleFacts("other", attention))
