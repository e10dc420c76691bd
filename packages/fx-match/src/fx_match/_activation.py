"""Which activation a function or a child module computes, found by running it and not by its name.

A probe of real numbers on the CPU goes through it in float64; the result is compared with reference formulas. So an
activation is recognised whatever its class is called, and a class that is called SiLU and computes something else is not.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fx_match._canonical import canonical, is_inplace
from fx_match._subject import Subject, SubjectLike

_REFERENCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x))),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "relu2": lambda x: torch.where(x > 0, x * x, 0.0),
    "relu6": lambda x: x.clamp(0.0, 6.0),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": lambda x: torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0.0),
    "mish": lambda x: x * torch.tanh(torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0.0)),
    "elu": lambda x: torch.where(x > 0, x, torch.expm1(x)),
    "selu": F.selu,
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "hardswish": lambda x: x * (x + 3.0).clamp(0.0, 6.0) / 6.0,
    "hardsigmoid": lambda x: (x + 3.0).clamp(0.0, 6.0) / 6.0,
    "logsigmoid": lambda x: x.clamp(max=0.0) - torch.log1p(torch.exp(-x.abs())),
    "identity": lambda x: x,
}

ACTIVATIONS = frozenset(_REFERENCES)
"""The activations that `activation` can name. "gelu_tanh" is also what is called gelu_new and gelu_pytorch_tanh."""

_TIGHT, _LOOSE = 1e-12, 1e-6


def activation(node: fx.Node, subject: SubjectLike) -> str | None:
    """The name in `ACTIVATIONS` of what the node computes of its one tensor operand; None if it is none of them.

    node: the call of a torch function or method, or of a child module without parameters and buffers.
    A result that agrees with one reference within 1e-12 of float64 is named; one that computes in float32 inside, within
    1e-6, if only one reference is that near. A function that changes the shape, is random, writes in place, or fails on
    the probe has no name.
    """
    subject = Subject.of(subject)
    if node.op == "call_module":
        child = subject.child(node)
        if child is None or node.kwargs or len(node.args) != 1 or not isinstance(node.args[0], fx.Node):
            return None
        return module_activation(child)
    if node.op not in ("call_function", "call_method") or is_inplace(node):
        return None
    if canonical(node) in ("to", "cast") or "." in canonical(node):  # another library's function may do anything
        return None
    if [*node.all_input_nodes] != [node.args[0] if node.args else None]:
        return None
    key = (node.target, node.args[1:], tuple(sorted(node.kwargs.items())))
    try:
        return _function_activation(*key)
    except TypeError:  # an argument that cannot be hashed is none that an activation takes
        return None


def module_activation(module: nn.Module) -> str | None:
    """The name in `ACTIVATIONS` of what a module computes; None for one with parameters or buffers."""
    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
        return None
    return function_activation(module)


@functools.lru_cache(maxsize=512)
def _function_activation(target: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> str | None:
    if isinstance(target, str):
        method: Any = getattr(torch.Tensor, target, None)
        return None if method is None else function_activation(lambda x: method(x, *args, **dict(kwargs)))
    return function_activation(lambda x: target(x, *args, **dict(kwargs)))


def function_activation(function: Callable[[torch.Tensor], Any]) -> str | None:
    """The name in `ACTIVATIONS` of what `function` computes of a float64 tensor on the CPU; None if none of them."""
    probe, references = _probe_and_references()
    first, second = _run(function, probe), _run(function, probe)
    if first is None or second is None or not torch.equal(first, second):
        return None
    errors = {name: float(((first - value).abs() / (1.0 + value.abs())).max()) for name, value in references.items()}
    tight = [name for name, error in errors.items() if error <= _TIGHT]
    near = tight or [name for name, error in errors.items() if error <= _LOOSE]
    return near[0] if len(near) == 1 else None


def _run(function: Callable[[torch.Tensor], Any], probe: torch.Tensor) -> torch.Tensor | None:
    given = probe.clone()
    try:
        with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(given)
    except Exception:  # whatever it is, it is no function of one real tensor
        return None
    if not isinstance(result, torch.Tensor) or result.shape != probe.shape or not torch.equal(given, probe):
        return None
    if not result.is_floating_point() or result.device.type != "cpu":
        return None
    result = result.to(torch.float64)
    return result if bool(torch.isfinite(result).all()) else None


@functools.lru_cache(maxsize=1)
def _probe_and_references() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    cpu = torch.device("cpu")  # said throughout: the caller may be inside `with torch.device("meta")`
    near = torch.linspace(-12.0, 12.0, 481, dtype=torch.float64, device=cpu)
    edges = [-1e3, -50.0, -20.0, -1e-3, -1e-6, 0.0, 1e-6, 1e-3, 20.0, 50.0, 1e3]
    far = torch.tensor(edges, dtype=torch.float64, device=cpu)
    generator = torch.Generator(cpu).manual_seed(0)
    rest = torch.randn(532, dtype=torch.float64, device=cpu, generator=generator) * 3.0
    # Two dimensions and no order: a function that mixes elements along an axis agrees with no reference.
    shuffle = torch.randperm(1024, device=cpu, generator=generator)
    probe = torch.cat((near, far, rest))[shuffle].reshape(8, 128)
    return probe, {name: reference(probe) for name, reference in _REFERENCES.items()}
