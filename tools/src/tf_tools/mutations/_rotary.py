"""Faults of rotary positions: dropped, added, other pairs, other frequencies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

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


def _rotary_dropped(anatomy: Anatomy) -> Iterator[Site]:
    for attention in anatomy.attentions:
        if attention.rotates:
            yield Site(attention.name, partial(changed_embeddings, attention.module, identity_rotation))


def _rotary_everywhere_dropped(anatomy: Anatomy) -> Iterator[Site]:
    for name, module in anatomy.rotaries:
        yield Site(name, partial(output_changed, module, lambda _, output: identity_rotation(output)))


def _rotary_rewritten(new: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Attention], Site]:
    """A site where `new(x, cos, sin)` replaces the query and the key that reach the attention interface."""

    def site(attention: Attention) -> Site:
        @contextlib.contextmanager
        def broken() -> Iterator[None]:
            seen: list[tuple[Tensor, Tensor]] = []

            def keep(embeddings: Any) -> Any:
                seen[:] = [embeddings]
                return embeddings

            def change(module: nn.Module, arguments: AttentionArguments) -> None:
                if module is attention.module:
                    for name in ("query", "key"):
                        arguments[name] = new(arguments[name], *seen[0])

            with changed_embeddings(attention.module, keep), changed_attention(change):
                yield

        return Site(attention.name, broken)

    return site


def _halves(cos: Tensor, sin: Tensor, head_dim: int) -> tuple[Tensor, Tensor] | None:
    """cos and sin [T, rotary / 2] of a rotation of halves; None if the layout is not that."""
    cos, sin = cos[0], sin[0]
    if 2 * cos.shape[-1] == head_dim:
        return cos, sin
    first, second = cos.chunk(2, dim=-1)
    return (first, sin.chunk(2, dim=-1)[0]) if torch.equal(first, second) else None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    rotary = 2 * cos.shape[-1]
    turned, rest = x[..., :rotary], x[..., rotary:]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1)


def _to_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    halves = _halves(cos, sin, x.shape[-1])
    assert halves is not None
    c, s = halves
    length = c * c + s * s  # not 1 where rotary embeddings are scaled
    return _rotate(_rotate(x, c / length, -s / length, interleaved=False), c, s, interleaved=True)


def _to_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    halves = _halves(cos, sin, x.shape[-1])
    assert halves is not None
    return _rotate(x, *halves, interleaved=False)


def _rotary_added(anatomy: Anatomy) -> Iterator[Site]:
    if any(a.rotates for a in anatomy.attentions):
        yield from (_rotary_rewritten(_to_rotated)(a) for a in anatomy.attentions if not a.rotates)


def _rotary_interleaved(anatomy: Anatomy) -> Iterator[Site]:
    yield from (_rotary_rewritten(_to_interleaved)(a) for a in anatomy.attentions if a.rotates)


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
    Mutation("rotary.interleaved", "pairs of neighbours rotated instead of halves", _rotary_interleaved),
    Mutation("rotary.frequencies", "plain frequencies of base 10000 whatever the config says", _frequencies_default),
    Mutation("rotary.scaling", "the rotary embedding's own scale dropped", _rotary_scaling),
)
