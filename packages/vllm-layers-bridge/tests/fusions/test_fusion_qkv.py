"""Query, key and value: layouts that fuse, near misses that do not, and instances that a match does not speak for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from vllm_layers_bridge.fusions import QKV, ModuleFacts
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import QKVLinearSpec, Source

HIDDEN, HEADS, KV_HEADS, DIM = 8, 4, 2, 6
X = torch.empty(1, 5, HIDDEN, device="meta")
COS = torch.empty(1, 5, DIM, device="meta")
MERGED_LINE = "query_output, key_output, value_output = self.qkv_proj(hidden_states).split(self.qkv_sizes, dim=-1)"


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


class BiasedAttention(PlainAttention):
    bias = (True, True, True)


class NormedAttention(_Base):
    def forward(self, hidden_states, cos, sin):
        query = self.q_norm(self.q_proj(hidden_states).view(1, -1, HEADS, DIM)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(1, -1, KV_HEADS, DIM)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(1, -1, KV_HEADS, DIM).transpose(1, 2)
        query, key = rotate(query, key, cos, sin)
        return self.attend(query, key, value)


class RopeOnSomeLayers(_Base):
    def __init__(self, use_rope: bool = True) -> None:
        super().__init__()
        self.use_rope = use_rope

    def forward(self, hidden_states, cos, sin):
        query, key = self.heads(self.q_proj(hidden_states)), self.heads(self.k_proj(hidden_states))
        value = self.heads(self.v_proj(hidden_states))
        if self.use_rope:
            query, key = rotate(query, key, cos, sin)
        return self.attend(query, key, value)


class OneLine(_Base):
    def forward(self, hidden_states, cos, sin):
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        return self.attend(self.heads(q), self.heads(k), self.heads(v))


class ValueFirst(_Base):
    def forward(self, hidden_states, cos, sin):
        v = self.heads(self.v_proj(hidden_states))
        k = self.heads(self.k_proj(hidden_states))
        q = self.heads(self.q_proj(hidden_states))
        return self.attend(*rotate(q, k, cos, sin), v)


class ShapedLikeQuery(_Base):
    def forward(self, hidden_states, cos, sin):
        query = self.q_proj(hidden_states)
        tokens = query.shape[1]
        key = self.k_proj(hidden_states).view(1, tokens, -1, DIM).transpose(1, 2)
        value = self.v_proj(hidden_states).view(1, tokens, -1, DIM).transpose(1, 2)
        return self.attend(self.heads(query), key, value)


class InABranch(_Base):
    packed = False

    def forward(self, hidden_states, cos, sin):
        if self.packed:
            q = k = v = self.q_proj(hidden_states)
        else:
            q = self.q_proj(hidden_states)
            k = self.k_proj(hidden_states)
            v = self.v_proj(hidden_states)
        return self.attend(self.heads(q), self.heads(k), self.heads(v))


class RopeBetween(_Base):
    def forward(self, hidden_states, cos, sin):
        query = self.heads(self.q_proj(hidden_states))
        query, _ = rotate(query, query, cos, sin)
        key = self.heads(self.k_proj(hidden_states))
        key, _ = rotate(key, key, cos, sin)
        value = self.heads(self.v_proj(hidden_states))
        return self.attend(query, key, value)


class ScaledQuery(_Base):
    def forward(self, hidden_states, cos, sin):
        query = self.q_proj(hidden_states) * DIM**-0.5
        return self.attend(
            self.heads(query), self.heads(self.k_proj(hidden_states)), self.heads(self.v_proj(hidden_states))
        )


class KeysOfAnother(_Base):
    """Layers that share keys and values with another have a branch of their own; these have not."""

    shared, own_keys = False, True

    def forward(self, hidden_states, cos, sin):
        query = self.heads(self.q_proj(hidden_states))
        if self.shared or not self.own_keys:
            key, value = cos, sin
        else:
            key = self.heads(self.k_proj(hidden_states))
            value = self.heads(self.v_proj(hidden_states))
        return self.attend(query, key, value)


class ValueIfThere(_Base):
    """Values are the keys where there is no projection for them; here there is one."""

    def forward(self, hidden_states, cos, sin):
        query = self.heads(self.q_proj(hidden_states))
        key = self.heads(self.k_proj(hidden_states))
        value = self.heads(self.v_proj(hidden_states)) if self.v_proj is not None else key
        if self.k_proj is None:
            return key
        return self.attend(query, key, value)


class BesideASize(_Base):
    """What else hangs on a size does not change which branch an attribute takes."""

    shared = False

    def forward(self, hidden_states, cos, sin):
        query = self.heads(self.q_proj(hidden_states))
        if not self.shared:
            key = self.heads(self.k_proj(hidden_states))
            value = self.heads(self.v_proj(hidden_states))
        if hidden_states.shape[1] > 8:
            query = query * 2
        return self.attend(query, key, value)


class CouldAttendToOthers(_Base):
    """Attention as encoder-decoder models write it for both their kinds; here no call gives other states."""

    def forward(self, hidden_states, cos, sin, other_states=None, cache=None):
        is_cross = other_states is not None
        query = self.heads(self.q_proj(hidden_states))
        is_updated = False
        if cache is not None:
            is_updated = cache.is_updated()
        current = other_states if is_cross else hidden_states
        if is_cross and cache is not None and is_updated:
            key, value = cache.key, cache.value
        else:
            key = self.heads(self.k_proj(current))
            value = self.heads(self.v_proj(current))
        return self.attend(query, key, value)


FUSES = [
    PlainAttention, BiasedAttention, NormedAttention, RopeOnSomeLayers, OneLine, ValueFirst, ShapedLikeQuery, InABranch,
    RopeBetween, ScaledQuery, KeysOfAnother, ValueIfThere, BesideASize,
    CouldAttendToOthers,
]  # fmt: skip


@pytest.mark.parametrize("cls", FUSES)
def test_three_projections_become_one(
    fuse: Callable[..., Any], attention_facts: Callable[..., ModuleFacts], cls: type[nn.Module]
) -> None:
    fused = fuse(QKV(), cls(), X, COS, COS, facts=attention_facts(HEADS, KV_HEADS, DIM))
    assert fused.text.count(MERGED_LINE) == 1
    for name in ("q_proj", "k_proj", "v_proj"):
        remaining = 1 if cls is InABranch and name == "q_proj" else 0  # on the path that is never taken
        assert fused.text.count(f"self.{name}(") == remaining
    assert fused.specs == (
        QKVLinearSpec(
            name="qkv_proj",
            sources=(
                Source("q_proj", "q", HEADS * DIM),
                Source("k_proj", "k", KV_HEADS * DIM),
                Source("v_proj", "v", KV_HEADS * DIM),
            ),
            in_features=HIDDEN,
            bias=cls is BiasedAttention,
            head_dim=DIM,
            value_head_dim=DIM,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            sizes_attribute="qkv_sizes",
        ),
    )


def attend_with_data(module, query, key, value, attention_mask=None, **keywords):
    output = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2), None


@pytest.mark.parametrize("cls", FUSES)
def test_the_rewritten_forward_computes_what_it_did_at_every_size(
    fuse: Callable[..., Any],
    attention_facts: Callable[..., ModuleFacts],
    monkeypatch: pytest.MonkeyPatch,
    cls: type[nn.Module],
) -> None:
    module = cls().requires_grad_(False)
    fused = fuse(QKV(), module, X, COS, COS, facts=attention_facts(HEADS, KV_HEADS, DIM))
    monkeypatch.setitem(globals(), "attention_leaf", attend_with_data)
    inputs = [[torch.randn(1, n, size) for size in (HIDDEN, DIM, DIM)] for n in (1, 2, 5, 9)]
    expected = [module(*given) for given in inputs]
    applied = fused.apply_plain()
    for given, output in zip(inputs, expected, strict=True):
        torch.testing.assert_close(applied(*given), output, rtol=1e-5, atol=1e-5)


def test_a_layer_without_rotary_embedding_is_fused_too(
    fuse: Callable[..., Any], attention_facts: Callable[..., ModuleFacts]
) -> None:
    fused = fuse(QKV(), RopeOnSomeLayers(False), X, COS, COS, facts=attention_facts(HEADS, KV_HEADS, DIM))
    assert MERGED_LINE in fused.text
    assert fused.trace.reads["use_rope"] is False


def test_which_is_the_query_is_read_from_the_graph(
    fuse: Callable[..., Any], attention_facts: Callable[..., ModuleFacts]
) -> None:
    class Misnamed(_Base):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.v_proj = self.v_proj, self.q_proj

        def forward(self, hidden_states, cos, sin):
            q, k, v = self.v_proj(hidden_states), self.k_proj(hidden_states), self.q_proj(hidden_states)
            return self.attend(self.heads(q), self.heads(k), self.heads(v))

    fused = fuse(QKV(), Misnamed(), X, COS, COS, facts=attention_facts(HEADS, KV_HEADS, DIM))
    assert [source.child for source in fused.specs[0].sources] == ["v_proj", "k_proj", "q_proj"]
