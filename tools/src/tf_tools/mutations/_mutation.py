"""What a mutation is: a named fault, the places of a model where it can be made, and a way to make and undo it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tf_tools.mutations._anatomy import Anatomy


@dataclass(frozen=True, slots=True)
class Site:
    """One place where a fault can be made. `broken()` makes it for as long as the context is open."""

    where: str
    broken: Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Mutation:
    """A fault that a server could have.

    Attributes:
        name: "feature.fault", as in the table of `python -m tf_tools.sensitivity`.
        fault: what a server with this fault does wrong, in a few words.
        find: the sites in a model; none when the model lacks the feature.
    """

    name: str
    fault: str
    find: Callable[[Anatomy], Iterable[Site]]

    def sites(self, model: PreTrainedModel | Anatomy) -> tuple[Site, ...]:
        """The places where this fault can be made, in the order of the model's modules."""
        return tuple(self.find(model if isinstance(model, Anatomy) else Anatomy.of(model)))

    def applies(self, model: PreTrainedModel | Anatomy) -> bool:
        """Whether the model has the feature that this mutation breaks."""
        return bool(self.sites(model))

    @contextlib.contextmanager
    def broken(self, model: PreTrainedModel | Anatomy) -> Iterator[None]:
        """The fault at all sites at once, undone at exit.

        Raises:
            ValueError: it does not apply.
        """
        sites = self.sites(model)
        if not sites:
            raise ValueError(f"{self.name} does not apply to this model; ask applies() first")
        with contextlib.ExitStack() as stack:
            for site in sites:
                stack.enter_context(site.broken())
            yield


@contextlib.contextmanager
def altered(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While active, the tensor holds `change` of its values, in place; afterwards the very values it had."""
    with torch.no_grad():
        kept = tensor.detach().clone()
        tensor.copy_(change(kept))
        try:
            yield
        finally:
            tensor.copy_(kept)


@contextlib.contextmanager
def exchanged(one: Tensor, other: Tensor) -> Iterator[None]:
    """While active, two tensors of one shape hold each other's values."""
    a, b = one.detach().clone(), other.detach().clone()
    with altered(one, lambda _: b), altered(other, lambda _: a):
        yield


@contextlib.contextmanager
def attribute_set(owner: object, name: str, value: object) -> Iterator[None]:
    """While active, the attribute has another value."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


@contextlib.contextmanager
def output_changed(module: torch.nn.Module, change: Callable[[tuple[object, ...], object], object]) -> Iterator[None]:
    """While active, the module returns `change(inputs, output)`."""
    handle = module.register_forward_hook(lambda _, args, output: change(args, output))
    try:
        yield
    finally:
        handle.remove()
