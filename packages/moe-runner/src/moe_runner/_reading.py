"""`read_experts`: what a module of experts computes, found by running it and comparing with every formula that its shapes allow.

Names decide nothing, and neither does the text of the forward: the module runs on numbers chosen so that each constant in it matters, and
exactly one combination of layout, gate and constants must give what it gave. Its forward may loop over the experts that were hit,
sort, or batch; that makes no difference to what it computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from moe_runner._arguments import RoutedCall, routed_call, rows_call
from moe_runner._gates import candidates, gate_function
from moe_runner._layouts import Layout, halves, layouts, of_expert
from moe_runner._numbers import Constants, Copy
from moe_runner._rows import CHILD, ByToken
from moe_runner.routers import Place
from moe_runner.specs import ExpertsSpec, ExpertTensor

_EXACT, _NEAR = 1e-9, 1e-5
_ROWS = 64
"""Output features on which candidates are compared; the one that agrees is compared on all."""
_LARGEST_CONSTANT = 1e4
_LARGEST_UNKNOWN = 1 << 26
"""Entries of experts whose tensors are not understood."""


@dataclass(frozen=True, slots=True)
class Experts:
    """What was read.

    spec: None where what the module computes is none of the formulas; `reason` then says why.
    tokenwise: whether each token's result was seen to depend on that token alone, so that it may run as it is written.
    arguments: where hidden states, ids and weights stand in the call; None where they do not.
    """

    spec: ExpertsSpec | None
    reason: str = ""
    tokenwise: bool = False
    arguments: tuple[Place, Place, Place] | None = None


def read_experts(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_experts: int,
    top_k: int | None = None,
) -> Experts:
    """Read the experts `module` that are called with `args` and `kwargs`, tensors on meta or anywhere.

    num_experts: routed experts, those that do nothing left out.
    top_k: experts per token, for experts that are called with rows for each of them (see `ExpertsSpec`).
    Whatever the module does is not raised: it is the reason why nothing was read.
    """
    rows = None if top_k is None else rows_call(args, kwargs or {}, num_experts)
    if rows is not None and top_k is not None:
        return _of_rows(module, *rows, num_experts, top_k)
    call = routed_call(args, kwargs or {})
    if call is None:
        return Experts(None, "it is not called with hidden states, ids of experts and weights alone")
    if any(True for _ in module.buffers()):
        return Experts(None, "it holds buffers beside its weights")
    try:
        return _Reading(module, call, args, dict(kwargs or {}), num_experts).run()
    except Exception as error:  # the module's own code, on numbers it was not made for
        first = str(error).split("\n", 1)[0][:200]
        return Experts(None, f"its forward does not run on numbers: {type(error).__name__}: {first}")


def _of_rows(module: nn.Module, place: Place, rows: Tensor, num_experts: int, top_k: int) -> Experts:
    """The reading of experts that are called with rows, by way of the same experts called with ids and weights."""
    tokens = rows.shape[:-1].numel() // num_experts
    hidden, weights = (torch.empty((tokens, size), device="meta") for size in (rows.shape[-1], top_k))
    by_token = ByToken(module, num_experts, rows.ndim)
    found = read_experts(
        by_token, (hidden, torch.empty_like(weights, dtype=torch.int64), weights), num_experts=num_experts
    )
    if found.spec is None:
        return Experts(None, found.reason)
    if found.spec.has_bias:
        return Experts(None, "it is called with rows of zeros, of which its biases make something else")
    tensors = tuple(
        msgspec.structs.replace(tensor, name=tensor.name.removeprefix(f"{CHILD}.")) for tensor in found.spec.tensors
    )
    return Experts(msgspec.structs.replace(found.spec, tensors=tensors, arguments=(place,), null=None), tokenwise=True)


class _Reading:
    def __init__(
        self, module: nn.Module, call: RoutedCall, args: tuple[Any, ...], kwargs: dict[str, Any], num_experts: int
    ) -> None:
        self.call, self.args, self.kwargs = call, args, kwargs
        self.experts = num_experts
        self.hidden = int(call.hidden.shape[-1])
        self.top_k = int(call.ids.shape[1])
        self.used = (0, num_experts - 1)
        self.copy = Copy(module, num_experts)
        self._products: dict[tuple[str, bool, int], Tensor] = {}
        self.layouts = tuple(
            layouts({name: value.shape for name, value in self.copy.parameters.items()}, num_experts, self.hidden)
        )

    def run(self) -> Experts:
        self._fill()
        constants = self._constants()
        x, ids, weights = self._inputs(constants)
        found = self._flat(self._run(x, ids, weights))
        if not bool(found.isfinite().all()):
            return Experts(None, "it does not give finite numbers")
        agreeing = list(self._agreeing(x, ids, weights, found, constants))
        if len(agreeing) != 1:
            if not bool((found.abs().amax(dim=1) > 0).all()):  # what is zero says nothing of what it depends on
                return Experts(None, "it gives zeros for random weights")
            if not self._is_tokenwise(x, ids, weights, found):
                return Experts(None, "what it gives for one token depends on other tokens")
            why = "none of the formulas that are known gives" if not agreeing else "several formulas give"
            if not self.layouts:
                shapes = ", ".join(f"`{name}` {list(value.shape)}" for name, value in self.copy.parameters.items())
                why = f"its tensors are not those of gated experts ({shapes}), and no formula gives"
            return Experts(None, f"{why} what its forward gives", tokenwise=True, arguments=self.call.places)
        layout, gate = agreeing[0]
        return Experts(
            ExpertsSpec(
                num_experts=self.experts,
                top_k=self.top_k,
                hidden_size=self.hidden,
                intermediate_size=layout.intermediate,
                gate=gate,
                tensors=layout.tensors,
                arguments=self.call.places,
                null=self._null(x, ids, weights, found),
            ),
            tokenwise=True,
            arguments=self.call.places,
        )

    # ---- numbers

    def _fill(self) -> None:
        """Random weights for the experts in use, of a size that keeps the projections of unit inputs near one."""
        generator = torch.Generator().manual_seed(0)
        if not self.layouts:  # what belongs to which expert is not known
            if sum(value.numel() for value in self.copy.parameters.values()) > _LARGEST_UNKNOWN:
                raise ValueError("its tensors are not those of gated experts, and too large to be run whole")
            for value in self.copy.parameters.values():
                value.uniform_(-1.7, 1.7, generator=generator).div_(self.hidden**0.5 if value.ndim > 1 else 1.0)
            return
        for name, value in self.copy.parameters.items():
            tensor = ExpertTensor(name, ("up",), packed=self._is_packed(name))
            for expert in self.used:
                one = of_expert(value, tensor, expert, self.experts)
                one.uniform_(-1.7, 1.7, generator=generator)
                if one.ndim == 2:
                    one.div_(self.hidden**0.5)

    def _is_packed(self, name: str) -> bool:
        return any(tensor.packed for layout in self.layouts for tensor in layout.tensors if tensor.name == name)

    def _constants(self) -> set[float]:
        x, ids, weights = self._inputs(set())
        with Constants() as constants:
            self._run(x, ids, weights)
        return {number for number in constants.found if 0 < abs(number) <= _LARGEST_CONSTANT}

    def _inputs(self, constants: set[float]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of several sizes: some stay below each constant, some go beyond it."""
        sizes = [0.3, 1.0, 2.0, 4.0, *(c * f for c in sorted({abs(c) for c in constants}) for f in (0.5, 2.0, 6.0))]
        generator = torch.Generator().manual_seed(1)
        dtype = self.copy.dtype
        x = torch.randn((len(sizes), self.hidden), generator=generator, dtype=dtype)
        x *= torch.tensor(sizes, dtype=dtype)[:, None]
        order = torch.randint(len(self.used), (len(sizes), self.top_k), generator=generator)
        weights = torch.rand((len(sizes), self.top_k), generator=generator, dtype=dtype) - 0.3
        return x, torch.tensor(self.used)[order], weights

    def _run(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        shape = self.call.hidden.shape
        x = x.clone().view(*(1 for _ in shape[:-2]), *x.shape)
        values = dict(zip(self.call.places, (x, ids.to(self.call.ids.dtype), weights.clone()), strict=True))
        args = tuple(values.get(place, value) for place, value in enumerate(self.args))
        out = self.copy.run(args, {name: values.get(name, value) for name, value in self.kwargs.items()})
        if not isinstance(out, Tensor) or out.shape != x.shape:
            raise ValueError(f"it gives {tuple(getattr(out, 'shape', ()))} for hidden states {tuple(x.shape)}")
        return out

    def _flat(self, out: Tensor) -> Tensor:
        return out.reshape(-1, self.hidden).to(self.copy.dtype)

    def _is_tokenwise(self, x: Tensor, ids: Tensor, weights: Tensor, found: Tensor) -> bool:
        alone = [self._flat(self._run(x[t : t + 1], ids[t : t + 1], weights[t : t + 1])) for t in range(len(x))]
        return _difference(torch.cat(alone), found) < _NEAR

    # ---- comparison

    def _agreeing(
        self, x: Tensor, ids: Tensor, weights: Tensor, found: Tensor, constants: set[float]
    ) -> Iterator[tuple[Layout, Any]]:
        """Layouts and gates that give `found`: all that do exactly, or else all that do nearly (it may compute in float32 inside)."""
        gates = list(candidates(constants))
        near, exact = [], []
        for layout in self.layouts:
            inputs = self._inputs_of_down(layout, x)
            for gate in gates:
                if gate.gated is not layout.gated:
                    continue
                function = gate_function(gate)
                difference = _difference(self._sum(layout, function, inputs, ids, weights, _ROWS), found[:, :_ROWS])
                if difference < _NEAR:
                    near.append((layout, gate))
                if difference < _EXACT:
                    exact.append((layout, gate))
        for layout, gate in exact or near:
            inputs = self._inputs_of_down(layout, x)
            whole = self._sum(layout, gate_function(gate), inputs, ids, weights, self.hidden)
            if _difference(whole, found) < _NEAR:
                yield layout, gate

    def _inputs_of_down(self, layout: Layout, x: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """Gate and up projections of all tokens, by expert."""
        result = {}
        for expert in self.used:
            found: dict[str, Tensor] = {}
            for tensor in layout.tensors:
                if tensor.halves != ("down",) and not tensor.bias:
                    found.update(zip(tensor.halves, halves(self._product(tensor, expert, x).t(), tensor), strict=True))
            for tensor in layout.tensors:
                if tensor.halves != ("down",) and tensor.bias:
                    whole = of_expert(self.copy.parameters[tensor.name], tensor, expert, self.experts)
                    for half, part in zip(tensor.halves, halves(whole, tensor), strict=True):
                        found[half] = found[half] + part[:, None]
            result[expert] = (found["gate" if layout.gated else "up"].t(), found["up"].t())
        return result

    def _product(self, tensor: ExpertTensor, expert: int, x: Tensor) -> Tensor:
        """Output features of all the projections in a tensor, [tokens, out]; computed once, whatever each is taken for."""
        key = (tensor.name, tensor.transposed, expert)
        if key not in self._products:
            self._products[key] = x @ of_expert(self.copy.parameters[tensor.name], tensor, expert, self.experts).t()
        return self._products[key]

    def _sum(
        self,
        layout: Layout,
        function: Any,
        inputs: dict[int, tuple[Tensor, Tensor]],
        ids: Tensor,
        weights: Tensor,
        rows: int,
    ) -> Tensor:
        total = torch.zeros((len(ids), min(rows, self.hidden)), dtype=self.copy.dtype)
        for expert in self.used:
            given = function(*inputs[expert])
            for tensor in sorted((t for t in layout.tensors if t.halves == ("down",)), key=lambda t: t.bias):
                one = of_expert(self.copy.parameters[tensor.name], tensor, expert, self.experts)[:rows]
                given = given + one if tensor.bias else given @ one.t()
            total += given * (weights * (ids == expert)).sum(dim=1, keepdim=True)
        return total

    def _null(self, x: Tensor, ids: Tensor, weights: Tensor, found: Tensor) -> Any:
        """What an id beyond the experts leads to."""
        ids = torch.cat((ids, torch.full((len(ids), 1), self.experts)), dim=1)
        weights = torch.cat((weights, torch.full((len(ids), 1), 0.7, dtype=weights.dtype)), dim=1)
        try:
            given = self._flat(self._run(x, ids, weights))
        except Exception:  # the forward has no such ids
            return None
        if _difference(given, found) < _NEAR:
            return "zero"
        return "identity" if _difference(given, found + 0.7 * x) < _NEAR else None


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of two results, each token's against the size of that token's."""
    size = other.abs().amax(dim=1).clamp(min=1e-12)
    return float(((one - other).abs().amax(dim=1) / size).max())
