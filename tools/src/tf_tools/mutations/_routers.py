"""Faults of routing: which experts, with what weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tf_tools.mutations._anatomy import Anatomy, Router
from tf_tools.mutations._mutation import Mutation, Site, output_changed

Routing = tuple[Tensor, Tensor, Tensor]
"""Logits [tokens, experts], weights [tokens, k], indices [tokens, k]."""


def _routing(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[Anatomy], Iterable[Site]]:
    """Sites where `change(logits, weights, indices)` gives the weights and indices that the experts get."""

    def find(anatomy: Anatomy) -> Iterable[Site]:
        return [Site(r.name, partial(output_changed, r.module, partial(_apply, r, change))) for r in anatomy.routers]

    return find


def _apply(router: Router, change: Callable[..., tuple[Tensor, Tensor]], _: object, output: Any) -> Any:
    parts = list(output)
    weights, indices = change(parts[router.logits], parts[router.weights], parts[router.indices])
    parts[router.weights], parts[router.indices] = weights.to(parts[router.weights].dtype), indices
    return tuple(parts)


def _not_renormalised(logits: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return torch.softmax(logits.float(), dim=-1).gather(-1, indices), indices


def _uniform(logits: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return torch.full_like(weights, 1.0 / weights.shape[-1]), indices


def _sigmoid(logits: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    gates = torch.sigmoid(logits.float()).gather(-1, indices)
    return gates / gates.sum(-1, keepdim=True), indices


def _weights_reversed(logits: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return weights.flip(-1), indices


def _next_best(logits: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    k = indices.shape[-1]
    runner_up = logits.topk(min(k + 1, logits.shape[-1])).indices[..., -1:]
    return weights, torch.cat((indices[..., :-1], runner_up), dim=-1)


ROUTERS = (
    Mutation(
        "router.renormalisation", "weights of the chosen experts not made to sum to 1", _routing(_not_renormalised)
    ),
    Mutation("router.weights", "the chosen experts averaged", _routing(_uniform)),
    Mutation("router.sigmoid", "sigmoid where softmax is meant", _routing(_sigmoid)),
    Mutation("router.order", "weights given to the chosen experts in reverse", _routing(_weights_reversed)),
    Mutation("router.selection", "the next best expert in place of the last chosen", _routing(_next_best)),
)
