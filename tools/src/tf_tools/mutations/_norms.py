"""Faults of norms: weight, offset, epsilon, or the whole norm dropped where only some models have one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from tf_tools.mutations._anatomy import Anatomy, Norm
from tf_tools.mutations._mutation import Mutation, Site, altered, attribute_set, output_changed


def _norm_sites(
    change: Callable[[Norm], Site | None], has: Callable[[Norm], bool]
) -> Callable[[Anatomy], Iterable[Site]]:
    return lambda anatomy: [s for n in anatomy.norms if has(n) and (s := change(n)) is not None]


def _weight_neutral(norm: Norm) -> Site:
    return Site(norm.name, lambda: altered(norm.weight, lambda v: torch.full_like(v, 1.0 - norm.offset)))


def _offset_dropped(norm: Norm) -> Site:
    return Site(norm.name, lambda: altered(norm.weight, lambda v: v - norm.offset))


def _offset_added(norm: Norm) -> Site:
    return Site(norm.name, lambda: altered(norm.weight, lambda v: v + 1.0))


def _eps_default(norm: Norm) -> Site | None:
    name = norm.eps_name
    return None if name is None else Site(norm.name, lambda: attribute_set(norm.module, name, 1e-6))


def _skipped(norm: Norm) -> Site:
    return Site(norm.name, lambda: output_changed(norm.module, lambda args, _: args[0]))


def _always(_: Norm) -> bool:
    return True


NORMS = (
    Mutation("norm.weight", "a norm without its weight", _norm_sites(_weight_neutral, _always)),
    Mutation(
        "norm.offset-dropped", "weight where 1 + weight is meant", _norm_sites(_offset_dropped, lambda n: n.offset == 1)
    ),
    Mutation(
        "norm.offset-added", "1 + weight where weight is meant", _norm_sites(_offset_added, lambda n: n.offset == 0)
    ),
    Mutation("norm.eps", "an eps of 1e-6 whatever the config says", _norm_sites(_eps_default, _always)),
    Mutation("norm.qk-skipped", "no norm of queries or keys", _norm_sites(_skipped, lambda n: n.in_attention)),
    Mutation(
        "norm.post-skipped",
        "no norm between a branch and the residual",
        _norm_sites(_skipped, lambda n: n.is_post_norm),
    ),
)
