"""What mixes tokens outside attention is found, and what treats each token alone is left in peace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tf_backend.plan.mixing import Mixing, MixingDetector
from torch import Tensor, nn

TOKENS, WIDTH = 37, 24


def mixing(forward: Callable[[Tensor], object], *shape: int) -> list[Mixing]:
    """Run `forward` on meta over [1, tokens, width], or `shape`."""
    detector = MixingDetector(TOKENS, lambda: "the.module")
    x = torch.empty(shape or (1, TOKENS, WIDTH), device="meta")
    with torch.device("meta"), torch.no_grad(), detector:
        forward(x)
    return detector.found


def parameter(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def heads(x: Tensor) -> Tensor:
    return x.view(1, TOKENS, 4, -1).transpose(1, 2)


def attention_by_hand(x: Tensor) -> Tensor:
    q = heads(x)
    return (q @ q.transpose(-1, -2)).softmax(-1) @ q


def shift_by_assignment(x: Tensor) -> Tensor:
    shifted = torch.zeros_like(x)
    shifted[:, 1:] = x[:, :-1]
    return shifted


MIXES: dict[str, Callable[[Tensor], object]] = {
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), parameter(WIDTH, 1, 4), padding=3, groups=WIDTH),
    "convolution of tokens as channels": lambda x: F.conv1d(x, parameter(8, TOKENS, 1)),
    "convolution with kernel one that pads": lambda x: F.conv1d(x.transpose(1, 2), parameter(8, WIDTH, 1), padding=1),
    "cumulative sum": lambda x: x.cumsum(1),
    "cumulative sum, last axis": lambda x: x.transpose(1, 2).cumsum(-1),
    "softmax over tokens": lambda x: x.softmax(1),
    "softmax over keys": lambda x: (heads(x) @ heads(x).transpose(-1, -2)).softmax(-1),
    "attention by hand": attention_by_hand,
    "fused attention": lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x)),
    "einsum over tokens": lambda x: torch.einsum("btd,bte->bde", x, x),
    "token shift by slicing": lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1),
    "token shift by pad": lambda x: F.pad(x, (0, 0, 1, -1)),
    "token shift by ZeroPad2d": nn.ZeroPad2d((0, 0, 1, -1)),
    "token shift by roll": lambda x: x.roll(1, 1),
    "token shift by assignment": shift_by_assignment,
    "flat roll": lambda x: x.roll(1),
    "matmul over tokens": lambda x: x.transpose(1, 2) @ x,
    "outer product of tokens, then contraction": lambda x: torch.bmm(x @ x.transpose(1, 2), x),
    "linear over tokens": lambda x: F.linear(x.transpose(1, 2), parameter(8, TOKENS)),
    "arange of tokens": lambda x: x + torch.arange(x.shape[1])[:, None],
    "arange from an offset": lambda x: torch.arange(2, 2 + x.shape[1]),
    "positions cut from a table": lambda x: x + parameter(512, WIDTH)[: x.shape[1]],
    "positions cut from the middle": lambda x: x + parameter(512, WIDTH)[2 : 2 + x.shape[1]],
    "sort": lambda x: x.sort(1),
    "topk over tokens": lambda x: x.topk(3, dim=1),
    "argsort": lambda x: x.argsort(dim=1),
    "flip": lambda x: x.flip(1),
    "mean over tokens": lambda x: x.mean(1),
    "mean over all": lambda x: x.mean(),
    "maximum over tokens": lambda x: x.max(1),
    "layer norm over tokens": lambda x: F.layer_norm(x.transpose(1, 2), (TOKENS,)),
    "group norm over tokens": lambda x: F.group_norm(x.transpose(1, 2), 4),
    "batch norm": nn.BatchNorm1d(TOKENS, device="meta"),
    "vector norm over tokens": lambda x: torch.linalg.vector_norm(x, dim=1),
    "last token": lambda x: x[:, -1],
    "python loop over tokens": lambda x: [token + 1 for token in x.unbind(1)],
    "split of tokens": lambda x: x.split(5, dim=1),
    "chunk of tokens": lambda x: x.chunk(2, dim=1),
    "gather of tokens": lambda x: x.gather(1, torch.zeros(1, 3, WIDTH, dtype=torch.long)),
    "index of tokens": lambda x: x[:, torch.zeros(3, dtype=torch.long)],
    "scatter into tokens": lambda x: x.index_add(1, torch.zeros(3, dtype=torch.long), parameter(1, 3, WIDTH)),
    "tokens doubled": lambda x: x.repeat(1, 2, 1),
    "tokens regrouped": lambda x: x.view(1, 2, -1).sum(1),
    "tokens regrouped by unfold": lambda x: x.unfold(1, 4, 1),
    "pooling": lambda x: F.avg_pool1d(x.transpose(1, 2), 2),
    "interpolation": lambda x: F.interpolate(x.transpose(1, 2), scale_factor=2),
    "fourier transform": lambda x: torch.fft.rfft(x, dim=1),
    "difference": lambda x: x.diff(dim=1),
    "distance between tokens": lambda x: torch.cdist(x, x),
    "sum over folded tokens": lambda x: x.reshape(TOKENS * WIDTH).sum(),
    "dropout, random by token": lambda x: F.dropout(x, training=True),
}  # fmt: skip


def rotary(x: Tensor) -> Tensor:
    frequencies = parameter(WIDTH // 8)[None, :, None] @ torch.zeros(1, 1, TOKENS)
    angle = torch.cat([frequencies.transpose(1, 2)] * 2, dim=-1)
    q = heads(x)
    half = q.shape[-1] // 2
    return q * angle.cos()[:, None] + torch.cat([-q[..., half:], q[..., :half]], dim=-1) * angle.sin()[:, None]


def expert_choice(x: Tensor) -> Tensor:
    scores, chosen = F.linear(x.view(-1, WIDTH), parameter(8, WIDTH)).softmax(-1).topk(2, dim=-1)
    return torch.zeros(TOKENS, 8).scatter(1, chosen, scores / scores.sum(-1, keepdim=True))


ALONE: dict[str, Callable[[Tensor], object]] = {
    "linear": lambda x: F.linear(x, parameter(7, WIDTH), parameter(7)),
    "linear of a flat row": lambda x: F.linear(x.view(-1, WIDTH), parameter(7, WIDTH)).view(1, TOKENS, 7),
    "addmm as Conv1D": lambda x: torch.addmm(parameter(7), x.view(-1, WIDTH), parameter(WIDTH, 7)),
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "rms norm by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "rms norm": lambda x: F.rms_norm(x, (WIDTH,)),
    "norm of each head": lambda x: F.layer_norm(heads(x), (WIDTH // 4,)),
    "group norm of each token": lambda x: F.group_norm(x.view(TOKENS, WIDTH), 4),
    "rotary": rotary,
    "heads": lambda x: heads(x).transpose(1, 2).reshape(1, TOKENS, WIDTH),
    "heads from a packed projection": lambda x: x.view(1, TOKENS, 3, 4, 2).permute(2, 0, 3, 1, 4).unbind(0),
    "split of features": lambda x: x.split([8, 16], dim=-1),
    "chunk of features": lambda x: x.chunk(2, dim=-1),
    "interleaved features": lambda x: torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2),
    "repeated kv heads": lambda x: heads(x)[:, :, None].expand(1, 4, 3, TOKENS, 6).reshape(1, 12, TOKENS, 6),
    "repeated heads by interleaving": lambda x: heads(x).repeat_interleave(2, dim=1),
    "heads as rows": lambda x: x.reshape(TOKENS * 4, WIDTH // 4) * 2,
    "pointwise convolution": lambda x: F.conv1d(x.transpose(1, 2), parameter(8, WIDTH, 1)),
    "convolution within a token": lambda x: F.conv1d(x.view(TOKENS, 1, WIDTH), parameter(8, 1, 3)),
    "experts chosen by topk": expert_choice,
    "softmax over features": lambda x: x.softmax(-1),
    "cumulative sum over features": lambda x: x.cumsum(-1),
    "sort of features": lambda x: x.sort(-1),
    "positions by table": lambda x: x + F.embedding(torch.zeros(1, TOKENS, dtype=torch.long), parameter(512, WIDTH)),
    "positions by index": lambda x: x + parameter(512, WIDTH)[torch.zeros(1, TOKENS, dtype=torch.long)],
    "all of the tokens": lambda x: x[:, 0:, :][:, slice(None)],
    "gated activation": lambda x: F.silu(x) * torch.sigmoid(x).clamp(max=3),
    "casts and copies": lambda x: x.to(torch.bfloat16).float().contiguous().clone().copy_(x),
    "where": lambda x: torch.where(x > 0, x, 0.0).masked_fill(x < -1, 0.0),
    "triangular mask": lambda x: torch.ones(TOKENS, TOKENS).tril(),
    "glu": lambda x: F.glu(x, dim=-1),
    "padded features": lambda x: F.pad(x, (0, 8)),
    "einsum within a token": lambda x: torch.einsum("bthd,hde->bthe", x.view(1, TOKENS, 4, 6), parameter(4, 6, 5)),
    "one hot": lambda x: F.one_hot(torch.zeros(TOKENS, dtype=torch.long), 8),
    "nothing with tokens": lambda x: parameter(16, 8).cumsum(0).softmax(0),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXES)
def test_mixing_is_found(name: str) -> None:
    found = mixing(MIXES[name])
    assert found
    assert found[0].module == "the.module"
    assert found[0].why.startswith("it ")
    assert found[0].place is not None


@pytest.mark.parametrize("name", ALONE)
def test_each_token_alone(name: str) -> None:
    assert mixing(ALONE[name]) == []


def test_an_operation_that_nobody_knows_is_a_doubt() -> None:
    (found, *_) = mixing(lambda x: torch.linalg.matrix_exp(torch.ones(4, TOKENS, 3, 3)))
    assert found.why == "it is not known to treat each token alone"


def test_the_line_is_the_models_own() -> None:
    (found,) = mixing(lambda x: x.cumsum(1))
    assert found.op == "cumsum"
    assert found.place is not None
    assert found.place.module == __name__
    assert "x.cumsum(1)" in found.place.text


def test_reasons_say_what_is_done_to_the_tokens() -> None:
    words = {
        "convolution": "convolves",
        "cumulative sum": "ordered",
        "softmax over tokens": "reduces",
        "matmul over tokens": "contracts",
        "token shift by slicing": "shifts or cuts",
        "arange of tokens": "counts tokens from 0",
        "positions cut from a table": "counts tokens from 0",
        "tokens regrouped": "regroups",
    }
    for name, word in words.items():
        assert word in mixing(MIXES[name])[0].why
