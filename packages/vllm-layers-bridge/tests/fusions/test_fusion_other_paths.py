"""Code that one trace does not show: paths that only other sizes take, or the next call, and what an expression does beside its value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch as th
import torch.nn.functional as F
from ast_rewrite import Refused
from torch import nn
from vllm_layers_bridge.fusions import QKV, GatedMLP, ModuleFacts, PackedGatedMLP, PackedQKV
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import AttentionSpec

HIDDEN, WIDTH, HEADS, DIM = 8, 12, 2, 4
X = torch.empty(1, 5, HIDDEN, device="meta")
FACTS = ModuleFacts("block", (AttentionSpec(HEADS, HEADS, DIM, DIM, 1.0),))


def bumped(x):
    x += 0.5


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, WIDTH)
        self.down = nn.Linear(WIDTH, HIDDEN)
        self.is_first = True

    def bump(self, x):
        x += 0.5

    def alone(self, x):
        return self.down(self.gate(x))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HEADS * DIM) for _ in range(3))
        self.qkv = nn.Linear(HIDDEN, 3 * HEADS * DIM)
        self.seen: list[float] = []

    def bump(self, x):
        x += 0.5

    def attend(self, q, k, v):
        q, k, v = (part.view(*part.shape[:-1], -1, DIM).transpose(1, 2) for part in (q, k, v))
        attention_leaf(self, q, k, v)  # it computes nothing: what it was given is returned in its place
        return torch.cat((q, k, v), dim=-1)


# Paths that only other sizes take


class WritesForOneToken(_Attention):
    def forward(self, x):
        q = self.q(x)
        if x.shape[1] == 1:
            bumped(x)
        return self.attend(q, self.k(x), self.v(x))


class WritesForOneTokenInAMethod(_Attention):
    def forward(self, x):
        q = self.q(x)
        if x.shape[1] == 1:
            self.bump(x)
        return self.attend(q, self.k(x), self.v(x))


class WritesForOneTokenThroughAnotherName(_Attention):
    def forward(self, x):
        write = x.add_
        q = self.q(x)
        if x.shape[1] == 1:
            write(0.5)
        return self.attend(q, self.k(x), self.v(x))


class GateInAMethod(_MLP):
    def forward(self, x):
        if x.shape[1] == 1:
            return self.alone(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GateByItsName(_MLP):
    def forward(self, x):
        if x.shape[1] == 1:
            return self.down(getattr(self, "gate")(x))  # noqa: B009
        return self.down(F.silu(self.gate(x)) * self.up(x))


# Paths that the next call takes


class AnotherPathTheSecondTime(_MLP):
    def forward(self, x):
        if self.is_first:
            self.is_first = False
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(self.gate(x))


class AnotherPathTheThirdTime(_Attention):
    def forward(self, x):
        q = self.q(x)
        if len(self.seen) > 1:
            q = self.q(x) * 2
        self.seen.append(1.0)
        return self.attend(q, self.k(x), self.v(x))


class AnotherInputTheFirstTime(_MLP):
    """As it is found after a run; before one, `up` reads another input than `gate`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_first = False

    def forward(self, x):
        gate = self.gate(x)
        if self.is_first:
            x = x * 2.0
            self.is_first = False
        return self.down(self.up(x) * F.silu(gate))


# What would go with an expression


class CountsInItsPlace(_MLP):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(HIDDEN, 2 * WIDTH)

    def half(self):
        self.calls = 1
        return WIDTH

    def forward(self, x):
        both = self.both(x)
        return self.down(F.silu(both[..., : self.half()]) * both[..., WIDTH:])


class NamesInItsPlace(CountsInItsPlace):
    def forward(self, x):
        both = self.both(x)
        return self.down(F.silu(both[..., : (half := WIDTH)]) * both[..., WIDTH:]) * half


REFUSED = [
    (QKV, WritesForOneToken, "not known to leave its arguments alone"),
    (QKV, WritesForOneTokenInAMethod, "not known to leave its arguments alone"),
    (QKV, WritesForOneTokenThroughAnotherName, "not known to leave its arguments alone"),
    (GatedMLP, GateInAMethod, r"`_MLP.alone` may use `self.gate`, which would be gone"),
    (GatedMLP, GateByItsName, "`GateByItsName.forward` may use `self.gate`"),
    (GatedMLP, AnotherPathTheSecondTime, "on a path that depends on the sample, or on an earlier call"),
    (QKV, AnotherPathTheThirdTime, "on a path that depends on the sample, or on an earlier call"),
    (GatedMLP, AnotherInputTheFirstTime, "x may not have the same value: x is bound again"),
    (PackedGatedMLP, CountsInItsPlace, r"self\.half\(\) would go"),
    (PackedGatedMLP, NamesInItsPlace, "binds a name"),
]


@pytest.mark.parametrize(("fusion", "cls", "reason"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_the_trace_does_not_show_is_refused(
    fuse: Callable[..., Any], fusion: type[Any], cls: type[nn.Module], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        fuse(fusion(), cls(), X, facts=FACTS)


# What is as good as any other spelling


class AnotherReceiver(_MLP):
    def forward(this, x):
        return this.down(F.silu(this.gate(x)) * this.up(x))


class AnotherReceiverInStatements(_MLP):
    def forward(this, x):
        up = this.up(x)
        gate = F.silu(this.gate(x))
        return this.down(gate * up)


class AnotherReceiverOfAttention(_Attention):
    def forward(this, x):
        return this.attend(this.q(x), this.k(x), this.v(x))


class SplitByATorchOfAnotherName(_Attention):
    def forward(this, x):
        return this.attend(*th.split(this.qkv(x), [HEADS * DIM] * 3, dim=-1))


class SplitByTheClass(_Attention):
    def forward(self, x):
        return self.attend(*torch.Tensor.split(self.qkv(x), [HEADS * DIM] * 3, -1))


class NamesWithTheActivation(_MLP):
    """The activation stays, and what it names; the projections are one."""

    def forward(self, x):
        up = self.up(x)
        gate = F.gelu(self.gate(x), approximate=(form := "tanh"))
        out = self.down(gate * up)
        return out * 2 if form == "tanh" else out


class ReadsOtherSizesOnAnotherPath(_Attention):
    """A size is asked for, and nothing that hangs on it touches the projections."""

    def forward(self, x):
        scale = 2.0 if x.shape[1] == 1 else 1.0
        return self.attend(self.q(x), self.k(x), self.v(x)) * scale


@pytest.mark.parametrize(
    ("fusion", "cls"),
    [
        (GatedMLP, AnotherReceiver),
        (GatedMLP, NamesWithTheActivation),
        (GatedMLP, AnotherReceiverInStatements),
        (QKV, AnotherReceiverOfAttention),
        (PackedQKV, SplitByATorchOfAnotherName),
        (PackedQKV, SplitByTheClass),
        (QKV, ReadsOtherSizesOnAnotherPath),
    ],
)
def test_the_spelling_makes_no_difference(fuse: Callable[..., Any], fusion: type[Any], cls: type[nn.Module]) -> None:
    module, given = cls().requires_grad_(False), torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(0))
    expected = module(given)
    assert torch.allclose(fuse(fusion(), module, given, facts=FACTS).apply_plain()(given), expected, atol=1e-5)


class GivenByKeyword(CountsInItsPlace):
    def forward(self, x):
        gate, up = self.both(input=x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class PackedGivenByKeyword(_Attention):
    def forward(self, x):
        return self.attend(*self.qkv(input=x).chunk(3, dim=-1))


@pytest.mark.parametrize(("fusion", "cls"), [(PackedGatedMLP, GivenByKeyword), (PackedQKV, PackedGivenByKeyword)])
def test_a_packed_projection_must_be_given_its_input_by_position(
    miss_of: Callable[..., Any], fusion: type[Any], cls: type[nn.Module]
) -> None:
    miss = miss_of(fusion(), cls(), X)
    assert "is given its input as `input=`; a layer of the engine takes it by position" in miss.reason
