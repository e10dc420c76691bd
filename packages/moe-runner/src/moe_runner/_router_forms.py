"""What a `RouterForm` computes, in torch, and the forms that a router may have.

In: logits, a correction, a form. Out: weights and ids; or how clear the choice was, for whoever compares two computations of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from moe_runner.routers import RouterForm

_LARGEST_EPSILON = 1e-3


def route(form: RouterForm, logits: Tensor, correction: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
    """Weights and ids [tokens, top_k] of logits [tokens, experts], in the type of the logits; `correction` is [experts] or None."""
    scores = logits.softmax(dim=-1) if form.score == "softmax" else logits.sigmoid()
    ids = _kept(form, _choosing(form, scores, correction)).topk(top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if form.renormalised:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total.clamp(min=form.epsilon) if form.epsilon_is_floor else total + form.epsilon)
    return weights * form.scaling, ids


def margins(form: RouterForm, logits: Tensor, correction: Tensor | None, top_k: int) -> Tensor:
    """For each token, how far the last that is chosen is from the first that is not, relative to it: of experts and of groups [tokens]."""
    scores = logits.softmax(dim=-1) if form.score == "softmax" else logits.sigmoid()
    choosing = _choosing(form, scores, correction)
    experts = _gap(_kept(form, choosing), top_k)
    return experts if form.groups == 1 else torch.minimum(experts, _gap(_by_group(form, choosing), form.groups_chosen))


def forms(
    top_k: int, experts: int, groups: Collection[tuple[int, int]], epsilons: Collection[float]
) -> Iterator[RouterForm]:
    """All forms with scaling 1 that can be told apart, corrections aside; `groups` are pairs of how many there are and are chosen."""
    kinds = [(1, 1, "max")]
    for count, chosen in sorted(groups):
        size = experts // count
        if count > 1 and experts % count == 0 and size > 1 and chosen < count and chosen * size >= top_k:
            # The best k experts lie in k groups or fewer, each with one of them at its head: k groups or more by their best are all groups.
            kinds += [(count, chosen, score) for score in ("max", "top2") if score == "top2" or chosen < top_k]
    small = sorted(epsilon for epsilon in epsilons if 0 < epsilon <= _LARGEST_EPSILON)
    sums = [(False, 0.0, False), (True, 0.0, False)]
    sums += [(True, epsilon, is_floor) for epsilon in small for is_floor in (False, True)]
    for score, (count, chosen, by), (renormalised, epsilon, is_floor) in itertools.product(
        ("softmax", "sigmoid"), kinds, sums
    ):
        if score == "softmax" and renormalised and top_k == experts:  # the sum is one
            continue
        yield RouterForm(
            score,  # type: ignore[arg-type]
            groups=count,
            groups_chosen=chosen,
            group_score=by,  # type: ignore[arg-type]
            renormalised=renormalised,
            epsilon=epsilon,
            epsilon_is_floor=is_floor,
        )


def _choosing(form: RouterForm, scores: Tensor, correction: Tensor | None) -> Tensor:
    if form.biased is not (correction is not None):
        raise ValueError(f"a correction goes with a form that is biased, and with no other ({form})")
    return scores if correction is None else scores + correction


def _by_group(form: RouterForm, choosing: Tensor) -> Tensor:
    grouped = choosing.view(*choosing.shape[:-1], form.groups, -1)
    return grouped.amax(dim=-1) if form.group_score == "max" else grouped.topk(2, dim=-1).values.sum(dim=-1)


def _kept(form: RouterForm, choosing: Tensor) -> Tensor:
    """Scores for the choice, those in groups that are not chosen out of reach."""
    if form.groups == 1:
        return choosing
    by_group = _by_group(form, choosing)
    at = by_group.topk(form.groups_chosen, dim=-1).indices
    is_kept = torch.zeros_like(by_group, dtype=torch.bool).scatter(-1, at, True)
    grouped = choosing.view(*choosing.shape[:-1], form.groups, -1)
    return grouped.masked_fill(~is_kept[..., None], float("-inf")).flatten(-2)


def _gap(values: Tensor, chosen: int) -> Tensor:
    if chosen == values.shape[-1]:
        return torch.ones_like(values[..., 0])
    best = values.topk(chosen + 1, dim=-1).values
    return (best[..., chosen - 1] - best[..., chosen]) / best[..., chosen - 1].abs().clamp(min=1e-300)
