"""`read_router`: which `RouterForm` a router module has, found by running it and comparing with every form that its shapes allow.

Names decide nothing. The module runs on numbers chosen so that each step shows: scores of several spreads, corrections that are large,
small and all negative, and logits so low that what is added to a sum of scores is most of it. Exactly one form must give what it gave.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runner._numbers import Constants, Copy
from moe_runner._router_forms import forms, margins, route
from moe_runner.routers import Place, RouterForm, RouterSpec

_NEAR = 1e-4
"""Relative; what a router computes in float32 of scores down to e**-75 is off by a quarter of it."""
_NEARER = 1e-5
"""The same where logits spread by no more than `_MODERATE`: what a router does to small weights alone shows there."""
_MODERATE = 2.0
_CROWD = 4096
"""Tokens that all choose the same experts: one that takes so many and no more would have to leave some out."""
_CLEAR = 1e-4
"""Relative distance between the last that is chosen and the first that is not, below which a token says nothing."""
_ENOUGH = 0.5
_SPREADS = ((0.3, 32), (1.0, 64), (2.0, 64), (14.0, 64), (25.0, 64))
_LOWEST = -75.0
"""Logits whose scores are still normal numbers in float32."""
_LEAST = 1e-33
"""Sum of the chosen scores below which they may not be, so that a token says nothing."""


@dataclass(frozen=True, slots=True)
class Router:
    """What was read.

    spec: None where the form is none of those that are known; `reason` then says why.
    correction: name of the parameter or buffer of the router that is the form's correction. given: or the place of the argument that is.
    """

    spec: RouterSpec | None
    form: RouterForm | None = None
    correction: str = ""
    given: Place | None = None
    reason: str = ""


def read_router(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    weights: int,
    ids: int,
    logits: Collection[int] = (),
    num_experts: int,
) -> Router:
    """Read the router `module`, which is called with `args` and `kwargs`, tensors on meta or anywhere.

    weights, ids: which of the values that it returns these are. logits: which others are used; they must be the logits.
    Whatever the module does is not raised: it is the reason why nothing was read.
    """
    try:
        return _Reading(module, args, dict(kwargs or {}), num_experts, weights, ids, tuple(logits)).run()
    except _Unread as problem:
        return Router(None, reason=str(problem))
    except Exception as error:  # the module's own code, on numbers it was not made for
        first = str(error).split("\n", 1)[0][:200]
        return Router(None, reason=f"its router does not run on numbers: {type(error).__name__}: {first}")


class _Unread(Exception):
    """Why nothing was read, as a clause."""


_Vector: TypeAlias = tuple[Literal["own", "given"], Place]
"""A vector [experts]: a parameter or buffer by name, or an argument by place."""


@dataclass(frozen=True, slots=True)
class _Roles:
    """Which of the vectors are added to logits and to scores; None where none is."""

    linear: _Vector | None
    correction: _Vector | None


class _Reading:
    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        experts: int,
        weights: int,
        ids: int,
        logits: tuple[int, ...],
    ) -> None:
        self.original, self.args, self.kwargs, self.experts = module, args, kwargs, experts
        self.weights, self.ids, self.logits = weights, ids, logits
        self.copy = Copy(module, experts)
        self.tensors = self.copy.parameters | _buffers(self.copy.module, self.copy.dtype)
        places: list[tuple[Place, Any]] = [*enumerate(args), *kwargs.items()]
        given = [(place, value) for place, value in places if value is not None]
        if not all(isinstance(value, Tensor) and value.is_floating_point() for _, value in given):
            raise _Unread("its router is called with something else than hidden states")
        self.vectors: dict[_Vector, Tensor] = {
            ("given", place): torch.zeros(value.shape, dtype=self.copy.dtype)
            for place, value in given
            if value.numel() == experts
        }
        hidden = [(place, value) for place, value in given if value.numel() != experts and value.ndim > 1]
        if len(hidden) != 1 or len(hidden) + len(self.vectors) != len(given):
            raise _Unread("its router is called with something else than hidden states")
        self.hidden, self.shape = hidden[0][0], hidden[0][1].shape
        self.width = int(self.shape[-1])
        matrices = [name for name, value in self.copy.parameters.items() if value.shape == (experts, self.width)]
        if len(matrices) != 1:
            raise _Unread("its router has no single weight of an entry for each expert and each feature")
        self.matrix = matrices[0]
        self.vectors |= {("own", name): value for name, value in self.tensors.items() if value.numel() == experts}
        self.outputs = self.top_k = 0
        self.generator = torch.Generator().manual_seed(5)

    def run(self) -> Router:
        self._fill(_SCALES[0])
        x = self._tokens(())
        with Constants() as constants, _Choices() as choices:
            self._given(x)
        small = [value for value in constants.found if 0 < value < 1]
        x = self._tokens(tuple(max(math.log(value) - 1, _LOWEST) for value in small))
        candidates = [
            (roles, msgspec.structs.replace(form, biased=roles.correction is not None))
            for roles in self._roles()
            for form in forms(self.top_k, self.experts, choices.found, constants.found)
            if not (
                form.epsilon and form.score == "softmax" and roles.correction is None
            )  # the sum is no less than 1 / experts
        ]
        factors = {1.0} | constants.found
        for scale in _SCALES if self.vectors else _SCALES[:1]:
            self._fill(scale)
            weights, ids, rows = self._given(x)
            if not bool(weights.isfinite().all()):
                raise _Unread("its router does not give finite numbers")
            found = torch.zeros((len(x), self.experts), dtype=self.copy.dtype).scatter_add(1, ids, weights)
            candidates = list(self._agreeing(candidates, x, found, factors))
            factors = {1.0}
            for row in rows:
                if row.shape != found.shape:
                    raise _Unread("its router returns something else that is used")
                candidates = [
                    (roles, form) for roles, form in candidates if _near(self._logits(roles, x), row, self.near)
                ]
            if len(candidates) == 1:
                self._require_room(found[:1], ids[:1], x[:1])
        if len(candidates) != 1:
            why = "what its router gives is none of the forms that are known"
            if candidates:
                why = "what its router gives is each of several forms: " + "; ".join(str(f) for _, f in candidates)
            raise _Unread(why)
        ((roles, form),) = candidates
        kind, place = roles.correction or ("own", "")
        spec = self._spec(roles)
        return Router(spec, form, given=place) if kind == "given" else Router(spec, form, correction=str(place))

    # ---- numbers

    def _fill(self, scale: tuple[float, float, bool]) -> None:
        """Random weights: a common direction of all rows moves all logits alike; corrections of a `scale` (low, high, per expert)."""
        low, high, each = scale
        for name, value in self.tensors.items():
            if name != self.matrix and ("own", name) not in self.vectors:
                value.uniform_(0.5, 1.5, generator=self.generator)
        for value in self.vectors.values():
            value.uniform_(low, high, generator=self.generator).div_(self.experts if each else 1.0)
        matrix = self.tensors[self.matrix]
        matrix.uniform_(-1.7, 1.7, generator=self.generator).div_(self.width**0.5)
        self.common = torch.full((self.width,), self.width**-0.5, dtype=self.copy.dtype)
        matrix.add_((1.0 - matrix @ self.common)[:, None] * self.common)

    def _tokens(self, shifts: tuple[float, ...]) -> Tensor:
        """Hidden states [tokens, hidden] whose logits spread more and less, and some whose logits are all low."""
        sizes = [size for size, count in _SPREADS for _ in range(count)]
        moved = [0.0] * len(sizes) + [shift for shift in sorted({-20.0, -45.0, *shifts}) for _ in range(12)]
        self.near = torch.tensor([_NEARER if size <= _MODERATE else _NEAR for size in sizes])
        sizes += [1.0] * (len(moved) - len(sizes))
        self.near = torch.cat((self.near, self.near.new_full((len(sizes) - len(self.near),), _NEAR)))
        generator = torch.Generator().manual_seed(6)
        x = torch.randn((len(sizes), self.width), generator=generator, dtype=self.copy.dtype)
        x *= torch.tensor(sizes, dtype=x.dtype)[:, None]
        return x + (torch.tensor(moved, dtype=x.dtype) - x @ self.common)[:, None] * self.common

    def _given(self, x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Weights, ids and the other rows that are used."""
        values = {place: value.clone() for (kind, place), value in self.vectors.items() if kind == "given"}
        values[self.hidden] = x.clone().view(*(1 for _ in self.shape[:-2]), *x.shape)
        args = tuple(values.get(place, value) for place, value in enumerate(self.args))
        out = self.copy.run(args, {name: values.get(name, value) for name, value in self.kwargs.items()})
        if type(out) not in (tuple, list):
            raise _Unread("its router returns no tuple")
        self.outputs = len(out)
        weights, ids = out[self.weights], out[self.ids]
        if weights.shape != ids.shape or ids.ndim != 2 or len(ids) != len(x) or ids.is_floating_point():
            raise _Unread("its router does not return weights and ids of one shape, a row for each token")
        self.top_k = int(ids.shape[1])
        return weights.to(x.dtype), ids.to(torch.int64), [out[at].to(x.dtype) for at in self.logits]

    def _require_room(self, found: Tensor, ids: Tensor, x: Tensor) -> None:
        """That a token [1, hidden] gets what it got, `found` [1, experts] by `ids` [1, k], among many that are like it."""
        weights, chosen, _ = self._given(x.expand(_CROWD, -1))
        crowd = torch.zeros((_CROWD, self.experts), dtype=self.copy.dtype).scatter_add(1, chosen, weights)
        if not bool((chosen.sort(dim=1).values == ids.sort(dim=1).values).all()) or not _near(
            crowd, found.expand_as(crowd), self.near[:1].expand(_CROWD)
        ):
            raise _Unread("what its router gives for a token depends on how many others choose the same experts")

    def _logits(self, roles: _Roles, x: Tensor) -> Tensor:
        logits = x @ self.tensors[self.matrix].t()
        return logits if roles.linear is None else logits + self.vectors[roles.linear].view(-1)

    def _roles(self) -> Iterator[_Roles]:
        linear = [None, *(vector for vector in self.vectors if vector[1] in self.copy.parameters)]
        for one, other in itertools.product(linear, (None, *self.vectors)):
            if one is None or one != other:
                yield _Roles(one, other)

    # ---- comparison

    def _agreeing(
        self, candidates: list[tuple[_Roles, RouterForm]], x: Tensor, found: Tensor, factors: set[float]
    ) -> Iterator[tuple[_Roles, RouterForm]]:
        """Candidates that give `found`, with the factor on weights that makes them so."""
        for roles, form in candidates:
            logits = self._logits(roles, x)
            correction = None if roles.correction is None else self.vectors[roles.correction].view(-1)
            plain = msgspec.structs.replace(form, renormalised=False, scaling=1.0)
            scores, _ = route(plain, logits, correction, self.top_k)
            clear = (margins(form, logits, correction, self.top_k) > _CLEAR) & (scores.sum(dim=1) > _LEAST)
            if float(clear.double().mean()) < _ENOUGH:
                continue
            weights, ids = route(form, logits, correction, self.top_k)
            given = torch.zeros_like(found).scatter(1, ids, weights)[clear]
            wanted = found[clear]
            size = float((wanted * given).sum() / given.square().sum())
            for factor in sorted(f for f in factors if abs(f - size) < _NEAR * abs(f)):
                if _near(given * factor, wanted, self.near[clear]):
                    yield roles, msgspec.structs.replace(form, scaling=form.scaling * factor)
                    break

    def _spec(self, roles: _Roles) -> RouterSpec:
        owner, _, _ = self.matrix.rpartition(".")
        is_layer = bool(owner) and type(self.original.get_submodule(owner)) is nn.Linear
        float32, is_called = self._in_16_bits(owner)
        if is_layer is not is_called:
            raise _Unread("its router does not call the layer that holds its weight, or calls a layer of its own")
        bias = "" if roles.linear is None else str(roles.linear[1])
        own = self.original._parameters
        is_own = isinstance(own.get(self.matrix), Tensor) and (not bias or getattr(own.get(bias), "ndim", 0) == 1)
        return RouterSpec(
            weight=self.matrix,
            bias=bias,
            child=owner if is_layer else "",
            hidden=self.hidden,
            outputs=self.outputs,
            float32=float32,
            engine_gate=is_own,
        )

    def _in_16_bits(self, owner: str) -> tuple[bool, bool]:
        """Whether logits are computed in float32 where weights and hidden states are in 16 bits, and whether `owner` is called."""
        self.copy = Copy(self.original, self.experts, torch.bfloat16)
        self.tensors = self.copy.parameters | _buffers(self.copy.module, torch.float32)
        for value in self.tensors.values():
            value.uniform_(-0.1, 0.1, generator=self.generator)
        calls: list[str] = []
        if owner:
            self.copy.module.get_submodule(owner).register_forward_pre_hook(lambda *_: calls.append(owner))
        with _Products(self.experts) as products:
            self._given(torch.randn((4, self.width), generator=self.generator).to(torch.bfloat16))
        if len(products.found) != 1:
            raise _Unread("its router computes its logits by no single product")
        return products.found == [torch.float32], bool(calls)


_SCALES = ((-0.6, 0.6, False), (-1.0, 1.0, True), (-2.5, -1.2, False), (-6.0, 6.0, False))
"""Of corrections: large against scores, of the size of a softmax over the experts, such that no score is left above zero, and such that
experts of next to no score are chosen."""


def _near(one: Tensor, other: Tensor, tolerance: Tensor) -> bool:
    """Whether rows agree within a part of their largest, [rows]."""
    size = other.abs().amax(dim=1).clamp(min=1e-300)
    return bool(((one - other).abs().amax(dim=1) / size < tolerance.to(size.dtype)).all())


def _buffers(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Buffers of numbers, by name, put in the place of those that `module` shares with its original."""
    made: dict[str, Tensor] = {}
    for path, inner in module.named_modules():
        own = dict(inner._buffers)
        for leaf, value in own.items():
            if value is not None and value.is_floating_point():
                own[leaf] = made[f"{path}.{leaf}" if path else leaf] = torch.zeros(value.shape, dtype=dtype)
        inner.__dict__["_buffers"] = own
    return made


class _Choices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects (length, how many) of each top-k."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[tuple[int, int]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket is torch.ops.aten.topk:
            self.found.add((int(args[0].shape[-1]), int(args[1])))
        return func(*args, **(kwargs or {}))


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the types of matrix products whose last dimension is the experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.experts = experts
        self.found: list[torch.dtype] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _PRODUCTS and out.shape[-1] == self.experts:
            self.found.append(out.dtype)
        return out


_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.linear)
