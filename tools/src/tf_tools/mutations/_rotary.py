"""Faults of rotary positions: dropped, added, other pairs, other frequencies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from tf_tools.mutations._anatomy import (
    Anatomy,
    Attention,
    AttentionArguments,
    changed_attention,
    changed_embeddings,
    identity_rotation,
)
from tf_tools.mutations._mutation import Mutation, Site, altered, attribute_set, output_changed
from tf_tools.mutations._rotation import (
    HALVES,
    INTERLEAVED,
    NONE,
    Embeddings,
    angles_of,
    rotate,
    turned_back,
)


def _rotary_dropped(anatomy: Anatomy) -> Iterator[Site]:
    for attention in anatomy.attentions:
        if attention.rotation != NONE:
            yield Site(attention.name, partial(changed_embeddings, attention.module, identity_rotation))


def _rotary_everywhere_dropped(anatomy: Anatomy) -> Iterator[Site]:
    for name, module in anatomy.rotaries:
        yield Site(name, partial(output_changed, module, lambda _, output: identity_rotation(output)))


def _rewritten(attention: Attention, new: Callable[[Attention, Tensor, Embeddings], Tensor]) -> Site:
    """A site where `new(attention, x, angles)` replaces the query and the key that reach the attention interface."""

    @contextlib.contextmanager
    def broken() -> Iterator[None]:
        seen: list[Embeddings] = []

        def keep(embeddings: Embeddings) -> Embeddings:
            seen[:] = [embeddings]
            return embeddings

        def change(module: nn.Module, arguments: AttentionArguments) -> None:
            if module is attention.module:
                for name in ("query", "key"):
                    arguments[name] = new(attention, arguments[name], angles_of(seen[0]))

        with changed_embeddings(attention.module, keep), changed_attention(change):
            yield

    return Site(attention.name, broken)


def _other_pairs(attention: Attention, x: Tensor, angles: Embeddings) -> Tensor:
    other = INTERLEAVED if attention.rotation == HALVES else HALVES
    return rotate(turned_back(x, angles, attention.rotation), angles, other)


def _rotary_added(anatomy: Anatomy) -> Iterator[Site]:
    pairs = next((a.rotation for a in anatomy.attentions if a.rotation in {HALVES, INTERLEAVED}), None)
    if pairs is None:
        return

    def added(_: Attention, x: Tensor, angles: Embeddings) -> Tensor:
        return rotate(x, angles, pairs)

    yield from (_rewritten(a, added) for a in anatomy.attentions if a.rotation == NONE)


def _rotary_other_pairs(anatomy: Anatomy) -> Iterator[Site]:
    yield from (_rewritten(a, _other_pairs) for a in anatomy.attentions if a.rotation in {HALVES, INTERLEAVED})


def _frequencies_default(anatomy: Anatomy) -> Iterator[Site]:
    for name, module in anatomy.rotaries:
        frequencies = module.inv_freq
        assert isinstance(frequencies, Tensor)
        half = frequencies.numel()
        plain = 10000.0 ** -(torch.arange(half, dtype=frequencies.dtype) / half)
        if not torch.allclose(plain, frequencies, rtol=1e-3):
            yield Site(name, partial(altered, frequencies, partial(_constant, plain)))


def _constant(value: Tensor, _: Tensor) -> Tensor:
    return value


def _rotary_scaling(anatomy: Anatomy) -> Iterator[Site]:
    for name, module in anatomy.rotaries:
        if getattr(module, "attention_scaling", 1.0) != 1.0:
            yield Site(name, partial(attribute_set, module, "attention_scaling", 1.0))


ROTARY = (
    Mutation("rotary.dropped", "no rotary embedding at all", _rotary_everywhere_dropped),
    Mutation("rotary.dropped-in-layer", "no rotary embedding in a layer that has it", _rotary_dropped),
    Mutation("rotary.added-in-layer", "rotary embedding in a layer that has none", _rotary_added),
    Mutation("rotary.pairs", "neighbours rotated instead of halves, or the reverse", _rotary_other_pairs),
    Mutation("rotary.frequencies", "plain frequencies of base 10000 whatever the config says", _frequencies_default),
    Mutation("rotary.scaling", "the rotary embedding's own scale dropped", _rotary_scaling),
)
