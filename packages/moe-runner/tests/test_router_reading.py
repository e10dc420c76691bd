"""Routers are read by what they give: every form is told from every other, and what is none of them stays unread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from moe_runner import Router, RouterForm, probes, read_router, route
from torch import Tensor, nn
from torch.nn import functional as F

E, H, K = 16, 32, 4
GROUPED = {"groups": 4, "groups_chosen": 2}


class Spelled(nn.Module):
    """Returns what no one uses, ids and weights. `linear`: logits have a bias too."""

    def __init__(self, form: RouterForm, *, linear: bool = False, float32: bool = True) -> None:
        super().__init__()
        self.form, self.float32 = form, float32
        self.a = nn.Parameter(torch.empty(E, H))
        self.b = nn.Parameter(torch.empty(E)) if linear else None
        self.c = nn.Buffer(torch.empty(1, E)) if form.biased else None

    def logits(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, H)
        if self.float32:
            return F.linear(x.float(), self.a.float(), None if self.b is None else self.b.float())
        return F.linear(x, self.a, self.b).float()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        form, logits = self.form, self.logits(x)
        scores = logits.softmax(-1) if form.score == "softmax" else logits.sigmoid()
        choosing = self.masked(scores if self.c is None else scores + self.c.squeeze())
        ids = choosing.topk(K, dim=-1).indices
        return logits, ids, self.shares(scores.gather(1, ids))

    def masked(self, choosing: Tensor) -> Tensor:
        form = self.form
        if form.groups == 1:
            return choosing
        groups = choosing.view(-1, form.groups, E // form.groups)
        best = groups.max(-1).values if form.group_score == "max" else groups.topk(2, dim=-1)[0].sum(-1)
        mask = torch.zeros_like(best).scatter_(1, best.topk(form.groups_chosen, dim=-1).indices, 1)
        return groups.masked_fill(~mask[..., None].bool(), self.nothing).view(-1, E)

    nothing = float("-inf")

    def shares(self, weights: Tensor) -> Tensor:
        form = self.form
        if form.renormalised:
            total = weights.sum(-1, keepdim=True)
            if form.epsilon:
                total = total.clamp(min=form.epsilon) if form.epsilon_is_floor else total + form.epsilon
            weights = weights / total
        return weights * form.scaling if form.scaling != 1.0 else weights


def read(module: nn.Module, *given: Tensor, logits: tuple[int, ...] = ()) -> Router:
    """What is read of a router on meta that is called with hidden states and `given`."""
    module = module.to("meta")
    return read_router(
        module, (torch.empty(37, H, device="meta"), *given), weights=2, ids=1, logits=logits, num_experts=E
    )


PROBES = tuple(probes(GROUPED["groups"], GROUPED["groups_chosen"]))
RICH = (
    RouterForm("sigmoid", biased=True, **GROUPED, group_score="top2", renormalised=True, epsilon=1e-20, scaling=2.5),
    RouterForm("softmax", biased=True, renormalised=True, epsilon=1e-12, epsilon_is_floor=True),
    RouterForm("sigmoid", renormalised=True, epsilon=1e-6),
    RouterForm("softmax", **GROUPED, scaling=16.0),
)
CHANGES: dict[str, dict[str, Any]] = {
    "other score": {},
    "correction": {"biased": False},
    "groups": {"groups": 1, "groups_chosen": 1, "group_score": "max"},
    "groups chosen": {"groups_chosen": 3},
    "score of a group": {},
    "renormalised": {"renormalised": False, "epsilon": 0.0, "epsilon_is_floor": False},
    "epsilon": {"epsilon": 0.0, "epsilon_is_floor": False},
    "kind of epsilon": {},
    "scaling": {"scaling": 1.0},
}


def changed(form: RouterForm, what: str) -> RouterForm:
    """`form` without one of its features, or with another in its place; itself where it has none such."""
    changes = dict(CHANGES[what])
    if what == "other score":
        changes["score"] = "sigmoid" if form.score == "softmax" else "softmax"
    if what == "score of a group" and form.groups > 1:
        changes["group_score"] = "max" if form.group_score == "top2" else "top2"
    if what == "groups chosen" and form.groups == 1:
        return form
    if what == "kind of epsilon" and form.epsilon:
        changes["epsilon_is_floor"] = not form.epsilon_is_floor
    return msgspec.structs.replace(form, **changes)


@pytest.mark.parametrize("form", [*PROBES, *RICH], ids=str)
def test_every_form_is_read(form: RouterForm) -> None:
    found = read(Spelled(form), logits=(0,))
    assert found.form == form, found.reason
    assert found.spec is not None
    assert (found.spec.weight, found.spec.hidden, found.spec.outputs) == ("a", 0, 3)
    assert found.correction == ("c" if form.biased else "")


@pytest.mark.parametrize(
    ("form", "what"), [(form, what) for form in RICH for what in CHANGES if changed(form, what) != form], ids=str
)
def test_every_feature_is_told(form: RouterForm, what: str) -> None:
    """A router without it is not taken for one that has it."""
    other = changed(form, what)
    found = read(Spelled(other)).form
    assert found != form
    if other.epsilon and other.score == "softmax" and not other.biased:  # no sum is small enough for it to matter
        other = msgspec.structs.replace(other, epsilon=0.0, epsilon_is_floor=False)
    assert found == other


@pytest.mark.parametrize("form", RICH, ids=str)
def test_a_bias_of_the_logits_is_told_from_a_correction(form: RouterForm) -> None:
    found = read(Spelled(form, linear=True))
    assert found.form == form, found.reason
    assert found.spec is not None
    assert found.spec.bias == "b"


def test_the_type_of_logits_is_read() -> None:
    specs = [read(Spelled(PROBES[0], float32=float32)).spec for float32 in (True, False)]
    assert [spec is not None and spec.float32 for spec in specs] == [True, False]


class Layered(Spelled):
    """Its weight is a layer's."""

    def __init__(self, *, calls: bool = True) -> None:
        super().__init__(RouterForm("softmax"))
        del self.a
        self.a = nn.Linear(H, E)  # type: ignore[assignment]
        self.calls = calls

    def logits(self, x: Tensor) -> Tensor:
        layer: Any = self.a
        return layer(x) if self.calls else torch.nn.functional.linear(x, layer.weight, layer.bias)


def test_a_layer_that_is_called_stays_one() -> None:
    spec = read(Layered()).spec
    assert spec is not None
    assert (spec.child, spec.weight, spec.bias, spec.float32) == ("a", "a.weight", "a.bias", False)
    assert "does not call the layer that holds its weight" in read(Layered(calls=False)).reason


class Given(Spelled):
    """Its correction is an argument."""

    def forward(self, x: Tensor, add: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        self.c = add  # type: ignore[assignment]
        return super().forward(x)


def test_a_correction_may_be_given() -> None:
    module = Given(RouterForm("sigmoid", renormalised=True))
    found = read(module, torch.empty(E, device="meta"))
    assert found.form == RouterForm("sigmoid", biased=True, renormalised=True), found.reason
    assert (found.correction, found.given) == ("", 1)


def odd(**methods: Callable[..., Any]) -> type[Spelled]:
    return type("Odd", (Spelled,), methods)


def _weights_with_correction(self: Spelled, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = self.logits(x)
    assert self.c is not None
    weights, ids = (logits.sigmoid() + self.c.squeeze()).topk(K, dim=-1)
    return logits, ids, weights


def _second_best(self: Spelled, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights, ids = self.logits(x).softmax(-1).topk(K + 1, dim=-1)
    return self.logits(x), ids[:, 1:], weights[:, 1:]


def _swapped(self: Spelled, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights, ids = self.logits(x).softmax(-1).topk(K, dim=-1)
    return self.logits(x), ids, weights.flip(-1)


def _by_other_tokens(self: Spelled, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights, ids = self.logits(x).softmax(0).topk(K, dim=-1)
    return self.logits(x), ids, weights


BIASED, PLAIN = RouterForm("sigmoid", biased=True), RouterForm("softmax")
ZEROS = RouterForm("sigmoid", biased=True, **GROUPED, group_score="top2")
UNKNOWN: dict[str, Spelled] = {
    "groups masked by zeros": odd(nothing=0.0)(ZEROS),  # type: ignore[arg-type]
    "weights with the correction": odd(forward=_weights_with_correction)(BIASED),
    "not the best": odd(forward=_second_best)(PLAIN),
    "weights in another order": odd(forward=_swapped)(PLAIN),
    "a softmax over tokens": odd(forward=_by_other_tokens)(PLAIN),
    "a temperature": odd(logits=lambda self, x: Spelled.logits(self, x) / 1.3)(PLAIN),
    "capped logits": odd(logits=lambda self, x: 30.0 * torch.tanh(Spelled.logits(self, x) / 30.0))(PLAIN),
    "a norm before": odd(logits=lambda self, x: Spelled.logits(self, torch.nn.functional.rms_norm(x, (H,))))(PLAIN),
    "root of the shares": odd(shares=lambda self, weights: weights.sqrt())(PLAIN),
    "another score": odd(logits=lambda self, x: Spelled.logits(self, x).exp())(PLAIN),
    "shares that are sums": odd(shares=lambda self, weights: weights.cumsum(-1))(PLAIN),
    "small weights left out": odd(shares=lambda self, weights: weights.where(weights > 1e-4, 0.0))(PLAIN),
    "a softmax twice": odd(shares=lambda self, weights: weights.softmax(-1))(PLAIN),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_none_of_the_forms_is_unread(what: str) -> None:
    found = read(UNKNOWN[what])
    assert (found.spec, found.form) == (None, None)
    assert "none of the forms that are known" in found.reason


def _with_room(room: Callable[[int], int]) -> Callable[..., Any]:
    """A forward whose experts take `room(tokens)` and no more, the first that come."""

    def forward(self: Spelled, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, ids, weights = Spelled.forward(self, x)
        taken = F.one_hot(ids, E)
        before = (taken.flatten(0, 1).cumsum(0).view_as(taken) * taken).sum(-1)
        return logits, ids, weights.where(before <= room(len(logits)), 0.0)

    return forward


@pytest.mark.parametrize(
    "room", [lambda tokens: max(4, 2 * tokens * K // E), lambda tokens: 1000], ids=["a part", "1000"]
)
def test_experts_that_take_so_many_tokens_and_no_more_are_told(room: Callable[[int], int]) -> None:
    """Of tokens that choose at random none is left out; the engine's batches are of any kind."""
    assert "how many others choose the same experts" in read(odd(forward=_with_room(room))(PLAIN)).reason
    assert read(odd(forward=_with_room(lambda tokens: tokens))(PLAIN)).form == PLAIN


def test_what_cannot_be_run_or_compared_is_unread() -> None:
    assert "with something else than hidden states" in read(Spelled(PLAIN), torch.empty(3, 3, device="meta")).reason
    ids = torch.empty(37, device="meta", dtype=torch.int64)
    assert "with something else than hidden states" in read(Spelled(PLAIN), ids).reason
    assert "returns no tuple" in read(odd(forward=lambda self, x: self.logits(x))(PLAIN)).reason
    assert "ValueError: no" in read(odd(logits=_raises)(PLAIN)).reason
    assert "no single weight" in read(_with_another(Spelled(PLAIN))).reason
    both = odd(forward=lambda self, x: (x, *Spelled.forward(self, x)[1:]))(PLAIN)
    assert "returns something else that is used" in read(both, logits=(0,)).reason
    doubled = odd(forward=_doubled)(PLAIN)
    assert "none of the forms" in read(doubled, logits=(0,)).reason
    assert read(doubled).form == PLAIN  # nobody uses what is not the logits


def test_forms_that_are_one_function_have_one_name() -> None:
    everything = Spelled(RouterForm("softmax", renormalised=True))
    one = msgspec.structs.replace(everything.form, renormalised=False)
    logits = torch.randn(5, K)
    assert torch.allclose(route(everything.form, logits, None, K)[0], route(one, logits, None, K)[0])
    assert (
        "softmax renormalised; sigmoid renormalised" in read(_Single(RouterForm("softmax", renormalised=True))).reason
    )


class _Single(Spelled):
    """With one expert for each token, every renormalised weight is one, whatever the score."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, ids, weights = super().forward(x)
        return logits, ids[:, :1], torch.ones_like(weights[:, :1])


def _doubled(self: Spelled, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, ids, weights = Spelled.forward(self, x)
    return 2 * logits, ids, weights


def _raises(self: Spelled, x: Tensor) -> Tensor:
    raise ValueError("no")


def _with_another(module: Spelled) -> Spelled:
    module.d = nn.Parameter(torch.empty(E, H))
    return module
