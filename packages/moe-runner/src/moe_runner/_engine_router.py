"""Which forms of routers an engine has, and how vLLM's is asked for one.

In: a `RouterForm`, the names of the forms that the engine has. Out: why it cannot be the engine's, or the arguments that make it so.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import Any

from moe_runner.routers import RouterForm

_LARGEST_EPSILON = 1e-12
LEAST_LOGIT = -80.0
"""Whose score is the smallest that float32 divides by without loss."""


def why_not_engine(form: RouterForm, available: Collection[str]) -> str:
    """Why the engine cannot route by `form`, as a clause; empty where it can.

    What is added to the sum of scores, or the least that it counts for, the engine leaves out. Where that is at most 1e-12, the weights
    are off by no more than that part of the sum of the chosen scores; where it is more, the form is not the engine's.
    """
    if form.name not in available:
        return f"its router is {form.name}, and the engine's are {', '.join(available) or 'none'}"
    if form.epsilon > _LARGEST_EPSILON:
        rest = "is divided by no less than" if form.epsilon_is_floor else "is divided by their sum plus"
        return f"each of its weights {rest} {form.epsilon:g}, which the engine's router leaves out"
    return ""


def engine_arguments(form: RouterForm) -> dict[str, Any]:
    """Arguments of vLLM's `create_fused_moe_router`, and of its factory, for `form`; scaling and correction aside."""
    is_plain = form.score == "softmax" and form.groups == 1 and not form.biased
    arguments: dict[str, Any] = {"scoring_func": form.score, "renormalize": form.renormalised}
    if not is_plain:
        arguments |= {"use_grouped_topk": True, "num_expert_group": form.groups, "topk_group": form.groups_chosen}
    return arguments


def probes(groups: int, chosen: int) -> Iterator[RouterForm]:
    """A form of each name that there is; those with groups have so many."""
    for score, biased, grouped, renormalised in itertools.product(
        ("softmax", "sigmoid"), (False, True), ("", "max", "top2"), (False, True)
    ):
        form = RouterForm(score, biased=biased, renormalised=renormalised)  # type: ignore[arg-type]
        if grouped:
            form = RouterForm(
                score,  # type: ignore[arg-type]
                biased=biased,
                groups=groups,
                groups_chosen=chosen,
                group_score=grouped,  # type: ignore[arg-type]
                renormalised=renormalised,
            )
        yield form
