"""Several calls of attention in one forward: each reaches its own holder, in order, or the forward stays as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ast_rewrite import Refused
from torch import nn
from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions import QKV, AttentionCalls, ModuleFacts
from vllm_layers_bridge.seams.attention import CHILD, AttentionCall, attention_interface
from vllm_layers_bridge.seams.leaf import attention_leaf, holder_name
from vllm_layers_bridge.specs import AttentionSpec

HIDDEN, HEADS, DIM = 8, 2, 4
SPEC = AttentionSpec(HEADS, HEADS, DIM, DIM, 0.5)
TWO = ModuleFacts("attention", (SPEC, SPEC))
X = torch.empty(1, 5, HIDDEN, device="meta")

attend: Callable[..., Any] = attention_leaf
"""Stands for the interface that a model looks up, so that a test can say which one it finds."""


def helper(module: nn.Module, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return attend(module, query, query, value)[0]


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(HIDDEN, HEADS * DIM, bias=False) for _ in range(3))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(1, -1, HEADS, DIM).transpose(1, 2)


class Twice(_Base):
    def forward(self, x):
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        first, _ = attend(self, q, k, v, None, scaling=0.5)
        second, _ = attend(self, q, k, v.flip(1), None, scaling=0.5)
        return first - 0.5 * second


class ByKeyword(_Base):
    def forward(self, x):
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        return attend(self, q, k, v)[0] + attend(query=q, key=k, value=v.flip(1), attention_mask=None, module=self)[0]


class Thrice(_Base):
    def forward(self, x):
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        return attend(self, q, k, v)[0] + attend(self, q, k, v)[0] + attend(self, k, q, v)[0]


class Once(_Base):
    def forward(self, x):
        return attend(self, *(self.heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj)))[0]


class InALoop(_Base):
    def forward(self, x):
        q, v = self.heads(self.q_proj(x)), self.heads(self.v_proj(x))
        out = 0.0
        for part in (q, v):
            out = out + attend(self, part, part, v)[0]
        return out


class InAHelper(_Base):
    def forward(self, x):
        q, v = self.heads(self.q_proj(x)), self.heads(self.v_proj(x))
        return helper(self, q, v) + helper(self, v, q)


class UnderAnotherName(_Base):
    def forward(self, x):
        q, me = self.heads(self.q_proj(x)), self
        return attend(self, q, q, q)[0] + attend(me, q, q, q)[0]


class Stopped(Twice):
    def forward(self, x):
        q = self.heads(self.q_proj(x))
        first, second = attend(self, q, q, q)[0], attend(self, q, q, q)[0]
        return first * float(second.sum())


class OverTokens(nn.Module):
    """Causal attention over a cache of its own, in the engine's layout: what this layer was given before is seen again."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.past: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, query, key, value):
        self.past.append((key, value))
        keys, values = (torch.cat(parts) for parts in zip(*self.past, strict=True))
        tokens = query.shape[0]
        q, k, v = (part.view(part.shape[0], HEADS, DIM).transpose(0, 1) for part in (query, keys, values))
        scores = q @ k.transpose(1, 2) * self.scale
        mask = torch.ones(tokens, k.shape[1], dtype=torch.bool).tril(k.shape[1] - tokens)
        return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(0, 1).reshape(tokens, -1)


@pytest.mark.parametrize(("cls", "calls"), [(Twice, 2), (ByKeyword, 2), (Thrice, 3)])
def test_each_call_gets_its_own_holder(cls: type[nn.Module], calls: int, fuse: Callable[..., Any]) -> None:
    fused = fuse(AttentionCalls(), cls().to("meta"), X, facts=ModuleFacts("attention", (SPEC,) * calls))
    assert fused.specs == ()
    places = [fused.text.index(f"self.{holder_name(at)}") for at in range(calls)]
    assert places == sorted(places)
    assert fused.text.count("self.attention_call_") == calls


def test_the_name_of_a_holder_holds_no_integer_of_vllms_counting() -> None:
    full = f"model.layers.3.self_attn.{holder_name(1)}.{CHILD}"
    assert [part for part in full.split(".") if part.isdigit()] == ["3"]


def _module_and_input() -> tuple[Twice, torch.Tensor]:
    torch.manual_seed(0)
    return Twice(), torch.randn(1, 4, HIDDEN)


def _run(
    fuse: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, layers: Callable[[], list[nn.Module]]
) -> torch.Tensor:
    """Three tokens, then one more, through the rewritten `Twice` with these layers."""
    module, x = _module_and_input()
    rewrite = fuse(AttentionCalls(), Twice().to("meta"), X, facts=TWO).rewrite
    for at, layer in enumerate(layers()):
        holder = AttentionCall()
        holder.add_module(CHILD, layer)
        module.add_module(holder_name(at), holder)
    module.__class__ = type("Twice", (Twice,), {"forward": rewrite.function})
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setitem(rewrite.function.__globals__, "attend", attention_interface)
        return torch.cat([module(x[:, :3]), module(x[:, 3:])], dim=1)


def test_numbers_with_a_cache_of_its_own_for_each_call(
    fuse: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _run(fuse, monkeypatch, lambda: [OverTokens(0.5), OverTokens(0.25)])
    module, x = _module_and_input()
    with torch.no_grad():
        q, k, v = (module.heads(proj(x)) for proj in (module.q_proj, module.k_proj, module.v_proj))
        kinds = ((0.5, v), (0.25, v.flip(1)))
        first, second = (
            nn.functional.scaled_dot_product_attention(q, k, value, is_causal=True, scale=scale)
            for scale, value in kinds
        )
    torch.testing.assert_close(found, (first - 0.5 * second).transpose(1, 2))


def test_swapped_or_shared_layers_would_show(fuse: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sound = _run(fuse, monkeypatch, lambda: [OverTokens(0.5), OverTokens(0.25)])
    swapped = _run(fuse, monkeypatch, lambda: [OverTokens(0.25), OverTokens(0.5)])
    assert float((swapped - sound).abs().max()) > 1e-2
    alike = _run(fuse, monkeypatch, lambda: [OverTokens(0.5), OverTokens(0.5)])
    shared = _run(fuse, monkeypatch, lambda: [OverTokens(0.5)] * 2)
    assert float((shared - alike).abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("cls", "reason"),
    [(InALoop, "runs more than once"), (InAHelper, "was made in `helper`"), (UnderAnotherName, "is given `me`")],
)
def test_calls_that_cannot_be_told_apart_are_refused(
    cls: type[nn.Module], reason: str, fuse: Callable[..., Any]
) -> None:
    with pytest.raises(Refused, match=reason):
        fuse(AttentionCalls(), cls().to("meta"), X, facts=TWO)


@pytest.mark.parametrize(
    ("cls", "reason"), [(Once, "calls the attention interface once"), (Stopped, "followed to its end")]
)
def test_misses(cls: type[nn.Module], reason: str, miss_of: Callable[..., Any]) -> None:
    assert reason in miss_of(AttentionCalls(), cls().to("meta"), X).reason


def test_a_module_that_was_seen_to_call_less_often(fuse: Callable[..., Any]) -> None:
    with pytest.raises(NotFusable, match="seen to call attention 1 times, and 2 calls were traced"):
        fuse(AttentionCalls(), Twice().to("meta"), X, facts=ModuleFacts("attention", (SPEC,)))


def test_a_name_that_is_taken(fuse: Callable[..., Any]) -> None:
    module = Twice().to("meta")
    module.attention_call_1 = 3
    with pytest.raises(NotFusable, match="has an attribute `attention_call_1`"):
        fuse(AttentionCalls(), module, X, facts=TWO)


def test_one_merged_projection_serves_all_calls_of_one_geometry(
    fuse: Callable[..., Any], miss_of: Callable[..., Any]
) -> None:
    (spec,) = fuse(QKV(), Twice().to("meta"), X, facts=TWO).specs
    assert [source.child for source in spec.sources] == ["q_proj", "k_proj", "v_proj"]
    other = dataclasses.replace(TWO, attention=(SPEC, AttentionSpec(1, 1, 8, 8, 0.5)))
    with pytest.raises(NotFusable, match="with heads of other sizes"):
        fuse(QKV(), Twice().to("meta"), X, facts=other)
    crossed = miss_of(QKV(), Thrice().to("meta"), X)
    assert "the query of one call comes from `q_proj` and of another from `k_proj`" in crossed.reason
