"""Latent attention: what expands keys and values gives way to what it was given, where it computes just what the engine's layer does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from vllm_layers_bridge.errors import NotFusable, WrongLayout
from vllm_layers_bridge.fusions import LatentAttention, ModuleFacts
from vllm_layers_bridge.seams.attention import CHILD, attention_interface
from vllm_layers_bridge.seams.latent import LatentLayer
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import AttentionSpec, LatentSpec

HIDDEN, HEADS, NOPE, ROPE, VALUE, RANK = 8, 2, 4, 2, 3, 6
SPEC = AttentionSpec(HEADS, HEADS, NOPE + ROPE, VALUE, 0.5)
FACTS = ModuleFacts("attention", (SPEC,))
FUSION = LatentAttention(((RANK, ROPE),))
X = torch.empty(1, 5, HIDDEN, device="meta")

attend: Callable[..., Any] = attention_leaf
"""Stands for the interface that a model looks up, so that a test can say which one it finds."""


class Plain(nn.Module):
    """Keys of each head first what it expands to, then the shared features."""

    bias = False

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * (NOPE + ROPE), bias=False)
        self.down = nn.Linear(HIDDEN, RANK + ROPE, bias=False)
        self.up = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=self.bias)
        self.scale = 1.0

    def parts(self, latent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.up(latent).view(1, -1, HEADS, NOPE + VALUE).transpose(1, 2).split([NOPE, VALUE], -1)

    def expand(self, latent, shared):
        key, value = self.parts(latent)
        return torch.cat((key, shared.expand(-1, HEADS, -1, -1)), -1), value

    def latents(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.down(x).view(1, 1, -1, RANK + ROPE).split([RANK, ROPE], -1)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x).view(1, -1, HEADS, NOPE + ROPE).transpose(1, 2)

    def forward(self, x):
        query = self.queries(x)
        latent, shared = self.latents(x)
        key, value = self.expand(latent, shared)
        return attend(self, query, key, value, None, scaling=0.5)[0]


class WrittenInPlace(Plain):
    def expand(self, latent, shared):
        key, value = self.parts(latent)
        whole = key.new_empty(*key.shape[:-1], NOPE + ROPE)
        whole[..., :NOPE].copy_(key)
        whole[..., NOPE:].copy_(shared)
        return whole, value


class OtherWayRound(Plain):
    """Takes the shared features first, and gives the value first."""

    def expand(self, shared, latent):
        key, value = self.parts(latent)
        return value, torch.cat((key, shared.expand(-1, HEADS, -1, -1)), -1)

    def forward(self, x):
        latent, shared = self.latents(x)
        value, key = self.expand(shared, latent)
        return attend(self, self.queries(x), key, value, None, scaling=0.5)[0]


class SharedFirst(Plain):
    def expand(self, latent, shared):
        key, value = self.parts(latent)
        return torch.cat((shared.expand(-1, HEADS, -1, -1), key), -1), value


class ValueFirst(Plain):
    def parts(self, latent):
        value, key = self.up(latent).view(1, -1, HEADS, NOPE + VALUE).transpose(1, 2).split([VALUE, NOPE], -1)
        return key, value


class InterleavedHeads(Plain):
    def parts(self, latent):
        return self.up(latent).view(1, -1, NOPE + VALUE, HEADS).transpose(1, 3).transpose(2, 3).split([NOPE, VALUE], -1)


class Scaled(Plain):
    def expand(self, latent, shared):
        key, value = super().expand(latent, shared)
        return key, value * 1.5


class Halved(Plain):
    def expand(self, latent, shared):
        return super().expand(latent * 0.5, shared)


class WithBias(Plain):
    bias = True


class InTheForward(Plain):
    def forward(self, x):
        latent, shared = self.latents(x)
        key, value = self.up(latent).view(1, -1, HEADS, NOPE + VALUE).transpose(1, 2).split([NOPE, VALUE], -1)
        key = torch.cat((key, shared.expand(-1, HEADS, -1, -1)), -1)
        return attend(self, self.queries(x), key, value, None, scaling=0.5)[0]


class UsedAgain(Plain):
    def forward(self, x):
        latent, shared = self.latents(x)
        key, value = self.expand(latent, shared)
        return attend(self, self.queries(x), key, value, None, scaling=0.5)[0] + value.transpose(1, 2)


class GivenMore(Plain):
    def expand(self, latent, shared, x):
        key, value = super().expand(latent, shared)
        return key + x[..., :1].unsqueeze(1), value

    def forward(self, x):
        latent, shared = self.latents(x)
        key, value = self.expand(latent, shared, x)
        return attend(self, self.queries(x), key, value, None, scaling=0.5)[0]


class OfExpressions(Plain):
    def forward(self, x):
        latent, shared = self.latents(x)
        key, value = self.expand(latent.contiguous(), shared)
        return attend(self, self.queries(x), key, value, None, scaling=0.5)[0]


class NotLatent(Plain):
    def forward(self, x):
        return attend(self, self.queries(x), self.queries(x), self.queries(x), None, scaling=0.5)[0]


class Absorbed(nn.Module):
    """In the place of vLLM's layer, as its own reference has it: queries meet the latent, and the value is made from what they gathered."""

    def __init__(self, up: nn.Linear) -> None:
        super().__init__()
        self.up = up

    def forward(self, query, latent, shared, output_shape):
        tokens = query.shape[0]
        key, value = self.up.weight.view(HEADS, NOPE + VALUE, RANK).split([NOPE, VALUE], 1)
        absorbed = torch.einsum("thn,hnr->htr", query[..., :NOPE], key)
        scores = absorbed @ latent.t() + query[..., NOPE:].transpose(0, 1) @ shared[:, 0].t()
        scores = (scores * 0.5).masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), -torch.inf)
        gathered = scores.softmax(-1) @ latent
        return torch.einsum("htr,hvr->thv", gathered, value).reshape(output_shape)


def _attend_plainly(module: nn.Module, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.5).transpose(
        1, 2
    ), None


@pytest.mark.parametrize("cls", [Plain, WrittenInPlace, OtherWayRound])
def test_numbers(cls: type[Plain], fuse: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fused = fuse(FUSION, cls().to("meta"), X, facts=FACTS)
    assert fused.specs == ()
    assert fused.match["spec"] == LatentSpec("up", RANK, ROPE)
    assert "self.expand(" not in fused.text
    torch.manual_seed(0)
    module, x = cls(), torch.randn(1, 5, HIDDEN)
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setitem(globals(), "attend", _attend_plainly)
        expected = module(x)
    with monkeypatch.context() as patched, torch.no_grad():
        module.add_module(CHILD, LatentLayer(Absorbed(module.up), fused.match["spec"], VALUE))
        module.__class__ = type(cls.__name__, (cls,), {"forward": fused.rewrite.function})
        patched.setitem(fused.rewrite.function.__globals__, "attend", attention_interface)
        found = module(x)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (SharedFirst, "computes other keys and values"),
        (ValueFirst, "computes other keys and values"),
        (InterleavedHeads, "computes other keys and values"),
        (Scaled, "computes other keys and values"),
        (Halved, "is not given a latent for `up`"),
        (InTheForward, "is not called in a method of its module that is given two names"),
        (OfExpressions, "is not called in a method of its module that is given two names"),
        (UsedAgain, "gives more, or less, than the key and the value"),
        (GivenMore, "is not called in a method of its module that is given two names"),
        (NotLatent, "keys and values are not made of a latent"),
    ],
)
def test_misses(cls: type[nn.Module], reason: str, miss_of: Callable[..., Any]) -> None:
    assert reason in miss_of(FUSION, cls().to("meta"), X).reason


def test_other_sizes_than_the_engines(miss_of: Callable[..., Any]) -> None:
    reason = miss_of(LatentAttention(((RANK, ROPE + 2),)), Plain().to("meta"), X).reason
    assert reason == "the engine takes no latent of 6 with 2 shared features"


def test_a_bias_is_not_lost(fuse: Callable[..., Any]) -> None:
    with pytest.raises(NotFusable, match="its `up` has a bias"):
        fuse(FUSION, WithBias().to("meta"), X, facts=FACTS)


@pytest.mark.parametrize(
    "change", [{"sliding_window": 4}, {"logits_soft_cap": 30.0}, {"sinks": "s"}], ids=lambda change: next(iter(change))
)
def test_attention_that_the_layer_does_not_compute(change: dict[str, Any], fuse: Callable[..., Any]) -> None:
    spec = AttentionSpec(HEADS, HEADS, NOPE + ROPE, VALUE, 0.5, **change)
    with pytest.raises(NotFusable, match="no window, no cap and no sinks"):
        fuse(FUSION, Plain().to("meta"), X, facts=dataclasses.replace(FACTS, attention=(spec,)))


def test_an_instance_of_other_sizes(fuse: Callable[..., Any]) -> None:
    spec = AttentionSpec(HEADS, 1, NOPE + ROPE, VALUE, 0.5)
    with pytest.raises(NotFusable, match="does not give a key and a value for each head"):
        fuse(FUSION, Plain().to("meta"), X, facts=dataclasses.replace(FACTS, attention=(spec,)))


def test_a_layer_that_is_given_keys_says_so() -> None:
    layer = LatentLayer(nn.Identity(), LatentSpec("up", RANK, ROPE), VALUE)
    query, key = torch.zeros(1, HEADS, 5, NOPE + ROPE), torch.zeros(1, HEADS, 5, NOPE + ROPE)
    with pytest.raises(WrongLayout, match=r"expected \[1, 1, 5, 2\] and \[1, 1, 5, 6\]"):
        layer(query, key, torch.zeros(1, HEADS, 5, VALUE))
