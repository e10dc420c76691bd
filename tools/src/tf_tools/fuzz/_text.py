"""The whole Python module around a forward: imports, helper functions, the class, what its instances differ in."""

from __future__ import annotations

import textwrap

from hypothesis import strategies as st

from tf_tools.fuzz._writer import Writer

HEADER = '''\
"""Généré."""
import contextlib
import functools
import torch
import torch as th
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

gated_output = 3.0

def _call(layer, given):
    return layer(given)

def _bump(value):
    value += 0.5
    return value

def _scaled(value, by=1.5):
    return value * by

def _bump_one(value):
    if value.shape[1] == 1:
        value += 0.5
    return value

def _doubled(forward):
    @functools.wraps(forward)
    def run(self, given, *others, **options):
        return forward(self, given * 2.0, *others, **options)
    return run

def _logged(forward):
    def run(*args, **options):
        return forward(*args, **options)
    return run

def _for_size(value):
    return value * 2.0 if value.shape[1] > 4 else value

def rotate(states):
    half = states.shape[-1] // 2
    return torch.cat((-states[..., half:], states[..., :half]), dim=-1)

def apply_rotary(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin

def apply_rotary_half(q, k, cos, sin):
    half = q.shape[-1] // 2
    cos, sin = cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1)
    q1, q2 = q[..., :half], q[..., half:]
    k1, k2 = k[..., :half], k[..., half:]
    return (
        torch.cat((q1 * cos - q2 * sin, q2 * cos + q1 * sin), -1),
        torch.cat((k1 * cos - k2 * sin, k2 * cos + k1 * sin), -1),
    )

def apply_rotary_adjacent(q, k, cos, sin):
    half = q.shape[-1] // 2
    cos, sin = cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1)
    def turn(states):
        one, other = states[..., ::2], states[..., 1::2]
        return torch.stack((one * cos - other * sin, other * cos + one * sin), -1).flatten(-2)
    return turn(q), turn(k)

def apply_rotary_scaled(q, k, cos, sin):
    q, k = apply_rotary(q, k, cos, sin)
    return q * 1.1, k

'''


def class_text(forward: str, init: str, writer: Writer, *, arguments: str) -> str:
    """The whole Python module: `init` is the body of ``__init__`` after ``super().__init__()``."""
    decorator, derived, name = "", "", "Block"
    if not writer.is_calm and writer.rarely(6):
        decorator = writer.pick("@torch.no_grad()", "@_doubled", "@_logged")
    elif not writer.is_calm and writer.rarely(8):
        name = "Base"
        derived = "\nclass Block(Base):\n" + writer.pick(
            "    pass\n",
            "    def forward(self, *args, **options):\n        return super().forward(*args, **options)\n",
            "    def forward(self, *args, **options):\n        again = super().forward(*args, **options)\n        return again\n",
            "    def unused(self):\n        return 1\n",
        )
    methods = "".join(f"\n{textwrap.indent(text, '    ')}\n" for text in writer.methods.values())
    first = f"    {decorator}\n" if decorator else ""
    return (
        f"{HEADER}\nclass {name}(nn.Module):\n"
        "    def __init__(self, config, flag=True, times=1, bias=False, other_bias=False, wide=False, plain=False):\n"
        "        super().__init__()\n"
        "        self.config, self.flag, self.times, self.seen = config, flag, times, []\n"
        f"{textwrap.indent(textwrap.dedent(init).strip(), '        ')}\n{methods}\n"
        f"{first}    def forward({writer.me}, {arguments}):\n{textwrap.indent(forward, '        ')}\n{derived}"
    )


INSTANCES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "flag": st.booleans(),
            "times": st.integers(1, 2),
            "bias": st.booleans(),
            "other_bias": st.just(True),
            "wide": st.booleans(),
            "plain": st.booleans(),
        },
    ),
    min_size=1,
    max_size=2,
)
"""What the instances of a model differ in."""
