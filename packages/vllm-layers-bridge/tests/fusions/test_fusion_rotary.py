"""Rotary embedding: every spelling of what the engine's kernel computes is taken, the layer computes the same, and no other function is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ast_rewrite import Patch, Refused
from fx_match import Match, Trace
from torch import nn
from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions import ModuleFacts, Rotary
from vllm_layers_bridge.layers.rotary import Rotary as RotaryLayer
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import Pairing

TOKENS, HEADS, KV_HEADS, DIM, HIDDEN = 7, 4, 2, 8, 16
attend: Callable[..., Any] = attention_leaf


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_adjacent(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def halves(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


_both = halves
"""The function itself, whatever `halves` is made to be."""


def leading(q, k, cos, sin):
    cos, sin, width = cos[:, None], sin[:, None], cos.shape[-1]
    turned = [torch.cat((x[..., :width] * cos + rotate_half(x[..., :width]) * sin, x[..., width:]), -1) for x in (q, k)]
    return tuple(turned)


def adjacent(q, k, cos, sin):
    cos, sin, dtype = cos.unsqueeze(1), sin.unsqueeze(1), q.dtype
    q, k = q.float(), k.float()
    return (q * cos + rotate_adjacent(q) * sin).to(dtype), (k * cos + rotate_adjacent(k) * sin).to(dtype)


def adjacent_by_first_half(q, k, cos, sin):
    cos, sin = (x[:, None, :, : x.shape[-1] // 2].repeat_interleave(2, dim=-1) for x in (cos, sin))
    return q * cos + rotate_adjacent(q) * sin, k * cos + rotate_adjacent(k) * sin


def once(q, k, cos, sin):
    def turned(x):
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            (first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None]), dim=-1
        )

    return turned(q), turned(k)


def one(x, sin, cos, unsqueeze_dim=2):
    return x * cos.unsqueeze(unsqueeze_dim) + rotate_half(x) * sin.unsqueeze(unsqueeze_dim)


def other_way(q, k, cos, sin):
    return _both(q, k, cos, -sin)


def key_twice_as_far(q, k, cos, sin):
    return _both(q, k, cos, sin)[0], _both(q, 2 * k, cos, sin)[1]


def into_halves(q, k, cos, sin):
    """As in DeepSeek: adjacent entries are paired, and the results stand in halves."""
    cos, sin = cos[:, None, :, : cos.shape[-1] // 2], sin[:, None, :, : sin.shape[-1] // 2]
    both = [(x[..., ::2], x[..., 1::2]) for x in (q, k)]
    return tuple(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1) for a, b in both)


def squared(q, k, cos, sin):
    return _both(q, k, cos, torch.sqrt(sin * sin))


def widened(q, k, cos, sin):
    q, k = _both(q, k, cos, sin)
    return q.double(), k.double()


def swapped(q, k, cos, sin):
    q, k = _both(q, k, cos, sin)
    return k, q


def overwriting(q, k, cos, sin):
    q.mul_(1.0)
    return _both(q, k, cos, sin)


class Block(nn.Module):
    """`function` is looked up in the globals of the forward, as in a model's file."""

    width = DIM

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * DIM, bias=False)

    def heads(self, x):
        return [
            proj(x).view(1, -1, proj.out_features // DIM, DIM).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        ]


class Halves(Block):
    def forward(self, x, position_embeddings):
        q, k, v = self.heads(x)
        cos, sin = position_embeddings
        q, k = halves(q, k, cos, sin)
        return attend(self, q, k, v)[0]


class KeepsQuery(Block):
    """Leaves what it turns in the module, where anything may read it."""

    def forward(self, x, position_embeddings):
        q, k, v = self.heads(x)
        self.kept = q
        cos, sin = position_embeddings
        q, k = halves(q, k, cos, sin)
        return attend(self, q, k, v)[0]


class Leading(Block):
    width = DIM // 2

    def forward(self, x, position_embeddings):
        q, k, v = self.heads(x)
        q, k = leading(q, k, cos=position_embeddings[0], sin=position_embeddings[1])
        return attend(self, q, k, v)[0]


class Adjacent(Block):
    def forward(self, x, cos, sin):
        q, k, v = self.heads(x)
        q, k = adjacent(q, k, cos, sin)
        return attend(self, query=q, key=k, value=v)[0]


class AdjacentByFirstHalf(Block):
    def forward(self, x, cos, sin):
        q, k, v = self.heads(x)
        q, k = adjacent_by_first_half(q, k, cos, sin)
        return attend(self, q, k, v)[0]


class Once(Block):
    width = DIM // 2

    def forward(self, x, cos, sin):
        q, k, v = self.heads(x)
        q, k = once(q, k, cos, sin)
        return attend(self, q, k, v)[0]


class OneByOne(Block):
    def forward(self, x, cos, sin):
        q, k, v = (part.transpose(1, 2) for part in self.heads(x))
        q = one(q, sin, cos, unsqueeze_dim=2).transpose(1, 2)
        k = one(k, sin, cos).transpose(1, 2)
        return attend(self, q, k, v.transpose(1, 2))[0]


class KeyIsValue(Block):
    """The key before its rotation is the value: nothing may be overwritten."""

    def forward(self, x, cos, sin):
        q, k, _ = self.heads(x)
        v = k
        q, k = halves(q, k, cos, sin)
        return attend(self, q, k, v)[0]


class QueryOfTheInput(Block):
    def forward(self, x, cos, sin):
        q = x.view(1, -1, 2, DIM).transpose(1, 2)
        _, k, v = self.heads(x)
        q, k = halves(q, k, cos, sin)
        return attend(self, q, k, v)[0]


class OneOverwrites(Block):
    """One call could overwrite, the other could not: two layers."""

    def forward(self, x, cos, sin):
        q, k, _ = self.heads(x)
        v = k
        q = one(q, sin, cos, 1)
        k = one(k, sin, cos, 1)
        return attend(self, q, k, v)[0]


TAKEN: dict[str, tuple[type[Block], list[tuple[str, str, str, int, bool]]]] = {
    "halves": (Halves, [("rotary", "halves", "twice", 2, True)]),
    "leading part": (Leading, [("rotary", "halves", "twice", 2, True)]),
    "adjacent": (Adjacent, [("rotary", "adjacent", "twice", 2, True)]),
    "first half": (AdjacentByFirstHalf, [("rotary", "adjacent", "first half", 2, True)]),
    "once": (Once, [("rotary", "halves", "once", 2, True)]),
    "one by one, sines first, tokens first": (OneByOne, [("rotary", "halves", "twice", 1, True)]),
    "read after": (KeyIsValue, [("rotary", "halves", "twice", 2, False)]),
    "kept in the module": (KeepsQuery, [("rotary", "halves", "twice", 2, False)]),
    "of the input": (QueryOfTheInput, [("rotary", "halves", "twice", 2, False)]),
    "two ways": (OneOverwrites, [("rotary", "halves", "twice", 2, True), ("rotary_1", "halves", "twice", 2, False)]),
}


def angles(cls: type[Block], pairing: Pairing = "halves") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    phases = torch.randn(1, TOKENS, cls.width if cls is Once else cls.width // 2, generator=generator)
    if cls is not Once:
        phases = torch.cat((phases, phases), -1) if pairing == "halves" else phases.repeat_interleave(2, -1)
    return phases.cos(), phases.sin()


def arguments(cls: type[Block], cos: torch.Tensor, sin: torch.Tensor) -> dict[str, Any]:
    x = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4))
    if cls in (Halves, KeepsQuery, Leading):
        return {"x": x, "position_embeddings": (cos, sin)}
    return {"x": x, "cos": cos, "sin": sin}


def facts(given: dict[str, Any], pairings: tuple[Pairing, ...] = ("halves", "adjacent")) -> ModuleFacts:
    return ModuleFacts("block", args=(), kwargs=given, holds_twice=lambda tensor, pairing: pairing in pairings)


def kernel(positions, query, key, head_dim, cos_sin, is_neox):
    """What vLLM's kernel does to rows of heads."""
    assert positions.dtype == torch.int64
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    for rows in (query, key):
        if rows is None:
            continue
        assert rows.stride(1) == 1
        heads = rows.unflatten(1, (-1, head_dim))
        width = cos_sin.shape[1]
        first, second = heads[..., :width].chunk(2, -1) if is_neox else (heads[..., :width:2], heads[..., 1:width:2])
        a, b = first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None]
        first.copy_(a)
        second.copy_(b)


@pytest.mark.parametrize("name", TAKEN)
def test_the_layer_computes_what_the_function_did(
    name: str, fuse: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cls, expected = TAKEN[name]
    module = cls()
    cos, sin = angles(cls, "adjacent" if cls is Adjacent else "halves")
    given = arguments(cls, cos, sin)
    fused = fuse(Rotary(), module, facts=facts(given), **given)
    assert [(s.name, s.pairing, s.angles, s.token_axis, s.in_place) for s in fused.specs] == expected
    handed: list[torch.Tensor] = []
    monkeypatch.setitem(
        globals(), "attend", lambda module, query, key, value: (handed.extend((query, key, value)), handed)
    )
    with torch.no_grad():
        module(**given)
        reference = [tensor.clone() for tensor in handed]
        for layer_kernel in (None, kernel):
            handed.clear()
            for spec in fused.specs:
                setattr(module, spec.name, RotaryLayer(spec, layer_kernel, ("cpu",)))
            rewritten = type(cls.__name__, (cls,), {"forward": fused.rewrite.function})
            module.__class__ = rewritten
            module(**given)
            module.__class__ = cls
            for found, wanted in zip(handed, reference, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


MISSES = {
    "other_way": "rotates in no way that the engine's kernel does",
    "key_twice_as_far": "rotates in no way that the engine's kernel does",
    "into_halves": "rotates in no way that the engine's kernel does",
    "squared": "computes `sqrt`",
    "widened": "another shape or type",
    "swapped": "another shape or type",
    "overwriting": "writes in place",
}


@pytest.mark.parametrize("name", MISSES)
def test_another_function_is_no_rotation(
    name: str, miss_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "halves", globals()[name])
    given = arguments(Halves, *angles(Halves))
    found = miss_of(Rotary(), Halves(), **given)
    assert MISSES[name] in found.reason, found.reason
    assert f"`{name}`" in found.reason


class ComputedAngles(Block):
    def forward(self, x, cos, sin):
        q, k, v = self.heads(x)
        q, k = halves(q, k, cos * 1.0, sin)
        return attend(self, q, k, v)[0]


class SeveralTimes(Block):
    def forward(self, x, cos, sin):
        q, k, v = self.heads(x)
        turned = []
        for part in (q, k):
            turned.append(one(part, sin, cos, 1))
        return attend(self, *turned, v)[0]


class OverAnotherPath(Block):
    def forward(self, x, cos, sin):
        q, k, v = self.heads(x)
        if x.shape[1] > 100:
            cos = sin
        q, k = halves(q, k, cos, sin)
        return attend(self, q, k, v)[0]


class WithoutAFunction(Block):
    def forward(self, x, cos, sin):
        q, k, v = self.heads(x)
        q = q * cos[:, None] + torch.cat((-q[..., DIM // 2 :], q[..., : DIM // 2]), dim=-1) * sin[:, None]
        return attend(self, q, k, v)[0]


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (ComputedAngles, "is given `cos` that the forward computes"),
        (SeveralTimes, "called several times at one place"),
        (OverAnotherPath, "may take another path"),
        (WithoutAFunction, "no function of the model rotates the query"),
    ],
)
def test_a_forward_that_is_not_plain(cls: type[Block], reason: str, miss_of: Callable[..., Any], traced: Any) -> None:
    given = arguments(cls, *angles(cls))
    found = miss_of(Rotary(), cls(), **given)
    assert reason in found.reason
    assert Rotary().is_candidate(traced(cls(), **given))


def test_a_module_without_positions_is_no_candidate(traced: Callable[..., Trace]) -> None:
    class Plain(Block):
        def forward(self, x):
            return attend(self, *self.heads(x))[0]

    assert not Rotary().is_candidate(traced(Plain(), torch.empty(1, TOKENS, HIDDEN)))


@pytest.mark.parametrize("pairings", [(), ("adjacent",)])
def test_angles_that_are_not_known_to_stand_twice(pairings: tuple[Pairing, ...], traced: Callable[..., Trace]) -> None:
    module, given = Halves(), arguments(Halves, *angles(Halves))
    found = Rotary().match(traced(module, **given))
    assert isinstance(found, Match)
    with pytest.raises(NotFusable, match=r"`position_embeddings\[0\]` is not known to hold each value twice"):
        Rotary().check(found, module, facts(given, pairings))


def test_angles_of_a_first_half_need_not_stand_twice(traced: Callable[..., Trace]) -> None:
    module, given = AdjacentByFirstHalf(), arguments(AdjacentByFirstHalf, *angles(AdjacentByFirstHalf))
    found = Rotary().match(traced(module, **given))
    assert isinstance(found, Match)
    Rotary().check(found, module, facts(given, ()))


def test_a_name_that_is_taken(traced: Callable[..., Trace]) -> None:
    module, given = Halves(), arguments(Halves, *angles(Halves))
    found = Rotary().match(traced(module, **given))
    assert isinstance(found, Match)
    module.rotary = nn.Identity()
    with pytest.raises(NotFusable, match="an attribute `rotary` already"):
        Rotary().check(found, module, facts(given))


class UnspelltArguments(Block):
    def forward(self, x, position_embeddings):
        q, k, v = self.heads(x)
        q, k = halves(q, k, *position_embeddings)
        return attend(self, q, k, v)[0]


def test_a_call_that_does_not_spell_its_arguments(traced: Callable[..., Trace]) -> None:
    from ast_rewrite import FunctionSource

    given = {"x": torch.empty(1, TOKENS, HIDDEN), "position_embeddings": angles(Halves)}
    seen = traced(UnspelltArguments(), **given)
    found = Rotary().match(seen)
    assert isinstance(found, Match)
    patch = Patch(FunctionSource.of(UnspelltArguments.forward))
    with pytest.raises(Refused, match="does not spell its arguments"):
        Rotary().rewrite(found, seen, patch)
    assert patch.edits == ()
