"""Rotary embedding as plain functions of (x, cos, sin), for the two ways of pairing channels, and how to tell them apart."""

from __future__ import annotations

import torch
from torch import Tensor

Embeddings = tuple[Tensor, Tensor]
"""cos and sin, each [1, T, rotary] with every angle twice, or [1, T, rotary / 2]."""

HALVES, INTERLEAVED, NONE, OTHER = "halves", "interleaved", "none", "other"
"""Channel i turns with i + rotary / 2; 2i turns with 2i + 1; nothing turns; none of these."""


def rotate(x: Tensor, angles: Embeddings, pairs: str) -> Tensor:
    """Turn the leading channels of x [..., T, head_dim] by the angles, given once each as [T, rotary / 2]."""
    cos, sin = angles
    rotary = 2 * cos.shape[-1]
    turned, rest = x[..., :rotary], x[..., rotary:]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if pairs == INTERLEAVED else turned.chunk(2, dim=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if pairs == INTERLEAVED else torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1)


def turned_back(x: Tensor, angles: Embeddings, pairs: str) -> Tensor:
    """What `rotate` made x from. cos and sin may carry a scale: they need not be of length 1."""
    cos, sin = angles
    length = cos * cos + sin * sin
    return rotate(x, (cos / length, -sin / length), pairs)


def angles_of(embeddings: Embeddings) -> Embeddings:
    """Each angle once: [T, rotary / 2], in whichever of the usual layouts the model keeps them."""
    cos, sin = embeddings[0][0], embeddings[1][0]
    if torch.equal(*cos.chunk(2, dim=-1)):
        return cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0]
    if torch.equal(cos[..., 0::2], cos[..., 1::2]):
        return cos[..., 0::2], sin[..., 0::2]
    return cos, sin


def pairs_of(plain: Tensor, turned: Tensor, embeddings: Embeddings) -> str:
    """Which way of pairing makes `turned` from `plain`."""
    if torch.equal(plain, turned):
        return NONE
    angles = angles_of(embeddings)
    if 2 * angles[0].shape[-1] <= plain.shape[-1]:
        for pairs in (HALVES, INTERLEAVED):
            if torch.allclose(rotate(plain, angles, pairs), turned, atol=1e-4, rtol=1e-4):
                return pairs
    return OTHER
