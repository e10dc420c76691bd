"""Two linears with anything between them: what placement must follow, or leave whole.

No fusion is about these blocks; what counts is how many of them are split over ranks, and that the ranks together give the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tf_tools.fuzz._program import HIDDEN, Program
from tf_tools.fuzz._text import INSTANCES, class_text
from tf_tools.fuzz._writer import Writer

Draw = Callable[[st.SearchStrategy[Any]], Any]
HEADS, DIM = 4, 4
INNER = HEADS * DIM


@st.composite
def pairs(draw: Draw) -> Program:
    """``down(steps(up(x)))``, the steps on [batch, tokens, INNER] or [batch, tokens, HEADS, DIM]."""
    w = Writer(draw, x="x", receiver="self", calm=True)
    w.put("batch, tokens, _ = x.shape")
    layout = "flat"
    w.put("h = self.up(x)")
    for _ in range(w.draw(st.integers(0, 5))):
        layout = _step(w, layout)
    _flatten(w, layout)
    out = w.pick(
        "self.down(h)", "self.down(h)", "self.down(h) + x", "self.down(self.drop(h))", "self.down(h) * self.times"
    )
    w.put(f"return {out}")
    init = f"""
        self.up = nn.Linear({HIDDEN}, {INNER}, bias=bias)
        self.side = nn.Linear({HIDDEN}, {INNER}, bias=other_bias)
        self.per_head = nn.Linear({HIDDEN}, {HEADS}, bias=bias)
        self.inside = nn.Linear({DIM}, {DIM}, bias=bias)
        self.down = nn.Linear({INNER}, {HIDDEN}, bias=other_bias)
        self.scale = nn.Parameter(torch.ones({INNER}))
        self.head_scale = nn.Parameter(torch.ones({HEADS}, 1))
        self.dim_scale = nn.Parameter(torch.ones({DIM}))
        self.one = nn.Parameter(torch.ones(1))
        self.register_buffer("mask", torch.arange({INNER}).float())
        self.drop, self.act, self.norm = nn.Dropout(0.1), nn.SiLU(), nn.LayerNorm({DIM})
        self.wide_norm = nn.LayerNorm({INNER})
        self.heads, self.dim, self.inner = {HEADS}, {DIM}, {INNER}
    """
    return Program("pair", class_text(w.body(), init, w, arguments="x"), tuple(w.draw(INSTANCES)))


_FLAT = (
    "torch.tanh(h)",
    "h * 2.0",
    "h + 0.5",
    "self.act(h)",
    "h * self.scale",
    "h + self.scale",
    "h * self.one",
    "h * torch.tanh(self.side(x))",
    "h + self.side(x)",
    "h.clamp(-1.0, 1.0)",
    "h * x.mean(-1, keepdim=True)",
    "h / h.shape[0]",
    "h * (1.0 + self.scale)",
    "-h",
    "h ** 2",
    "torch.where(h > 0, h, h * 0.1)",
    "h.masked_fill(h < 0, 0.0)",
    "h - h.mean(1, keepdim=True)",
    "h.cumsum(1)",
    "h.flip(1)",
    "h.softmax(1)",
    "torch.lerp(h, self.side(x), 0.3)",
    "h[:, :]",
    "h[:, :, :]",
    "h.unsqueeze(1).squeeze(1)",
    "h.clone()",
    "h.roll(1, 1)",
    "h.type_as(x)",
    "h.view(h.shape)",
    "h.view(*h.shape)",
    "h.view(batch, tokens, -1)",
    "h.reshape(tokens, batch, -1).reshape(batch, tokens, -1)",
    "h.transpose(1, 2).transpose(-1, -2)",
    "h.movedim(1, 0).movedim(0, 1)",
    "h.expand(2, -1, -1, -1).mean(0)",
    "torch.stack((h, h)).sum(0)",
    "torch.cat((h, h), 0)[:batch]",
    "torch.cat((h[:, :1], h[:, 1:]), 1)",
    "h.repeat(1, 1, 1)",
    "torch.zeros_like(h) + h",
    "h.new_zeros(h.shape) + h",
    "h * h.new_full((h.shape[-1],), 0.5)",
    "h * self.drop(h)",
    "F.pad(h, (0, 0, 1, 0))[:, 1:]",
    "F.pad(h, (0, 0, 0, 1))[:, :-1]",
    "torch.maximum(h, self.side(x))",
    "h.sign() * h.abs().sqrt()",
    "h.mT.mT",
    "h.swapaxes(1, 2).swapaxes(1, 2)",
    "h * torch.sigmoid(self.per_head(x).sum(-1, keepdim=True))",
    "h * self.per_head(x).repeat_interleave(self.dim, dim=-1)",
)
_FLAT_ODD = (
    "h.softmax(-1)",
    "h - h.mean(-1, keepdim=True)",
    "h / h.shape[-1]",
    "h * h.sum()",
    "h * self.mask",
    "self.wide_norm(h)",
    "h.flip(-1)",
    "h.roll(1, -1)",
    "h[..., :].cumsum(-1)",
    "torch.cat((h[..., 4:], h[..., :4]), -1)",
    "h * self.scale.sum()",
    "h * self.scale * self.scale.mean()",
    "h @ torch.eye(16)",
    "F.normalize(h, dim=-1)",
    "h * torch.arange(h.shape[-1])",
    "h * len(h)",
    "h.view(batch, -1, tokens).view(batch, tokens, -1)",
    "F.pad(h, (1, -1))",
    "h * self.scale[:1]",
    "h.sort(-1).values",
    "h * h[..., :1]",
    "h.transpose(1, 2).reshape(batch, tokens, -1)",
    "F.layer_norm(h, (h.shape[-1],))",
    "h * (2.0 if h.shape[-1] > 8 else 3.0)",
    "h.view(batch * tokens, -1).view(-1, tokens, batch).view(batch, tokens, -1)",
    "h.norm(dim=-1, keepdim=True) * h",
    "torch.where(self.mask > 7, h, 0.0)",
    "h.index_select(-1, torch.arange(15, -1, -1))",
    "h * h.numel()",
    "h * h.size(2)",
    "h + torch.ones(16)",
    "h.view(batch, tokens, 2, -1).transpose(2, 3).flatten(2)",
    "h.unfold(-1, 4, 4).flatten(2)",
    "h.view(-1, batch, tokens).view(batch, tokens, -1)",
    "h.tile(1, 1, 2)[..., 8:24]",
    "h.repeat(1, 1, 2)[..., :h.shape[-1]]",
    "h.amax(-1, keepdim=True) + h",
    "h.gather(-1, torch.zeros_like(h).long())",
    "h * torch.linspace(0, 1, h.shape[-1])",
    "F.glu(torch.cat((h, h), -1))",
    "h.var(-1, keepdim=True) + h",
    "h.tril()",
)
_HEADS = (
    "torch.tanh(h)",
    "h * self.head_scale",
    "h * self.dim_scale",
    "self.norm(h)",
    "self.inside(h)",
    "h.softmax(-1)",
    "h - h.mean(-1, keepdim=True)",
    "h.flip(-1)",
    "h * torch.sigmoid(self.per_head(x)).unsqueeze(-1)",
    "h * self.per_head(x)[..., None]",
    "h.transpose(1, 2).transpose(1, 2)",
    "torch.cat((-h[..., 2:], h[..., :2]), -1)",
    "h[..., 0:1] * h",
    "h[:, :, :, :2].repeat(1, 1, 1, 2)",
    "h.permute(0, 2, 1, 3).permute(0, 2, 1, 3)",
    "h[..., :2].repeat_interleave(2, dim=-1)",
    "h * h.shape[1]",
    "torch.stack((h, h), -1).sum(-1)",
    "F.normalize(h, dim=-1)",
    "h.cumsum(1)",
    "F.rms_norm(h, (4,))",
    "h.transpose(1, 2).contiguous().transpose(1, 2)",
    "torch.cat(h.chunk(2, -1)[::-1], -1)",
    "h.unflatten(-1, (2, 2)).flip(-1).flatten(-2)",
    "h.mT.mT",
    "torch.einsum('bthd,de->bthe', h, torch.ones(4, 4))",
    "h @ torch.ones(4, 4)",
    "h.matmul(h.transpose(-1, -2).matmul(h))",
    "torch.stack(h.unbind(1), 1)",
    "h.select(0, 0)[None].expand(batch, -1, -1, -1)",
    "h.narrow(-1, 0, 2).repeat(1, 1, 1, 2)",
)
_HEADS_ODD = (
    "h.flip(2)",
    "h.roll(1, 2)",
    "h.softmax(2)",
    "h - h.mean(2, keepdim=True)",
    "h[:, :, :1] * h",
    "h * h.shape[2]",
    "h.cumsum(2)",
    "h.transpose(2, 3)",
    "h * torch.arange(h.shape[2]).view(-1, 1)",
    "torch.stack(h.unbind(2)[::-1], 2)",
    "h * self.head_scale.sum()",
    "h.sum(2, keepdim=True) + h",
    "h[:, :, torch.arange(h.shape[2])]",
    "h.repeat_interleave(2, dim=2)[:, :, ::2]",
    "h.expand(batch, tokens, self.heads, self.dim)",
    "torch.cat((h[:, :, 2:], h[:, :, :2]), 2)",
    "h.repeat(1, 1, 2, 1)[:, :, :self.heads]",
    "h.view(batch, tokens, 2, -1, 4).flip(2).flatten(2, 3)",
    "h @ h.transpose(-1, -2) @ h",
    "F.layer_norm(h, (h.shape[2], 4))",
    "h[:, :, :2].repeat_interleave(2, dim=2)",
    "h.view(batch, tokens, -1, 2).flip(2).view(h.shape)",
    "h.flatten(2).view(batch, tokens, self.dim, -1).transpose(2, 3)",
)
_IN_PLACE = (
    "h *= 0.5",
    "h.add_(1.0)",
    "h.mul_(self.one)",
    "h[:, :1] = 0.0",
    "h[..., 0] = 0.0",
    "h.clamp_(-1.0, 1.0)",
    "h.copy_(torch.tanh(h))",
    "h.sub_(h.mean())",
)
_VIEWS = (
    "h.view(batch, tokens, -1, 4)",
    "h.view(batch, tokens, self.heads, self.dim)",
    "h.view(batch, tokens, self.heads, -1)",
    "h.unflatten(-1, (-1, 4))",
    "h.reshape(*h.shape[:-1], -1, self.dim)",
    "h.view(batch, tokens, h.shape[-1] // 4, 4)",
    "h.reshape(batch, tokens, 4, 4)",
    "h.unflatten(2, (self.heads, self.dim))",
    "h.view(*x.shape[:2], self.inner // self.dim, self.dim)",
)
_FLATTENED = (
    "h.flatten(2)",
    "h.reshape(batch, tokens, -1)",
    "h.reshape(batch, tokens, self.inner)",
    "h.view(batch, tokens, self.heads * self.dim)",
    "h.reshape(*h.shape[:2], -1)",
    "h.reshape(batch, tokens, 16)",
    "h.flatten(-2)",
    "h.reshape(batch, tokens, h.shape[2] * h.shape[3])",
)


def _step(w: Writer, layout: str) -> str:
    if w.rarely(12):
        w.put(w.pick(*_IN_PLACE))
        return layout
    if w.rarely(4):
        if layout == "heads":
            _flatten(w, layout)
            return "flat"
        w.put(f"h = {w.pick(*_VIEWS)}")
        return "heads"
    plain, odd = (_FLAT, _FLAT_ODD) if layout == "flat" else (_HEADS, _HEADS_ODD)
    w.put(f"h = {w.pick(*(odd if w.rarely(10) else plain))}")
    return layout


def _flatten(w: Writer, layout: str) -> None:
    if layout == "heads":
        w.put(f"h = {w.pick(*_FLATTENED)}")
