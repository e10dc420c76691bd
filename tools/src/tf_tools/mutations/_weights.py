"""Faults of loading: biases dropped, weights in each other's place, a head tied or not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from tf_tools.mutations._anatomy import Anatomy
from tf_tools.mutations._mutation import Mutation, Site, altered, attribute_set, exchanged

_ROLES = {
    "q": {"q_proj", "query", "q_lin", "wq"},
    "k": {"k_proj", "key", "k_lin", "wk"},
    "v": {"v_proj", "value", "v_lin", "wv"},
    "gate": {"gate_proj", "w1"},
    "up": {"up_proj", "w3"},
}
"""Leaf names of projections, by role: which of three equal shapes is which cannot be seen from outside."""


def _role(name: str) -> str:
    leaf = name.rpartition(".")[2]
    return next((role for role, leaves in _ROLES.items() if leaf in leaves), "")


def _bias_kind(anatomy: Anatomy, name: str) -> str:
    owner = name.rpartition(".")[0]
    if any(n.name == owner for n in anatomy.norms):
        return "norm"
    if anatomy.model.get_output_embeddings() is anatomy.model.get_submodule(owner):
        return "head"
    if any(r.name == owner for r in anatomy.routers):
        return "router"
    if any(e == owner for e, _ in anatomy.experts):
        return "experts"
    if any(owner.startswith(f"{a.name}.") for a in anatomy.attentions):
        return _role(owner) or "o"
    return "mlp"


def _biases(kind: str) -> Callable[[Anatomy], Iterable[Site]]:
    def find(anatomy: Anatomy) -> Iterator[Site]:
        for name, parameter in anatomy.model.named_parameters():
            if "bias" in name.rpartition(".")[2] and _bias_kind(anatomy, name) == kind:
                yield Site(name, partial(altered, parameter, torch.zeros_like))

    return find


def _swapped(one: str, other: str) -> Callable[[Anatomy], Iterable[Site]]:
    """Sites where two sibling projections of one shape, by role, hold each other's weights."""

    def find(anatomy: Anatomy) -> Iterator[Site]:
        for name, module in anatomy.model.named_modules():
            children = {_role(n): m for n, m in module.named_children() if isinstance(m, nn.Linear)}
            a, b = children.get(one), children.get(other)
            if a is not None and b is not None and a.weight.shape == b.weight.shape:
                yield Site(name, partial(exchanged, a.weight, b.weight))

    return find


def _gate_up(anatomy: Anatomy) -> Iterator[Site]:
    yield from _swapped("gate", "up")(anatomy)
    for name, module in anatomy.model.named_modules():
        if name.endswith(".gate_up_proj") and isinstance(module, nn.Linear):
            yield Site(name, partial(altered, module.weight, partial(_halves_swapped, 0)))
    for name, module in anatomy.experts:
        packed = getattr(module, "gate_up_proj", None)
        if isinstance(packed, nn.Parameter):
            axis = -1 if getattr(module, "is_transposed", False) else -2
            change = _halves_swapped if getattr(module, "is_concatenated", True) else _neighbours_swapped
            yield Site(f"{name}.gate_up_proj", partial(altered, packed, partial(change, axis)))


def _key_value(anatomy: Anatomy) -> Iterator[Site]:
    yield from _swapped("k", "v")(anatomy)
    for attention in anatomy.attentions:
        packed = getattr(attention.module, "qkv_proj", None)
        key = attention.key_heads * attention.head_dim
        if (
            isinstance(packed, nn.Linear)
            and packed.out_features == attention.query_heads * attention.head_dim + 2 * key
        ):
            where = f"{attention.name}.qkv_proj"
            yield Site(where, partial(exchanged, packed.weight[-2 * key : -key], packed.weight[-key:]))


def _halves_swapped(axis: int, weight: Tensor) -> Tensor:
    return weight.roll(weight.shape[axis] // 2, dims=axis)


def _neighbours_swapped(axis: int, weight: Tensor) -> Tensor:
    order = torch.arange(weight.shape[axis]).view(-1, 2).flip(-1).flatten()
    return weight.index_select(axis, order)


def _expert_order(anatomy: Anatomy) -> Iterator[Site]:
    """The first two experts in each other's place: in all their tensors at once, which have experts on axis 0."""
    for name, module in anatomy.experts:
        yield Site(name, partial(_reordered, list(module.parameters(recurse=False))))


@contextlib.contextmanager
def _reordered(parameters: list[nn.Parameter]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for parameter in parameters:
            stack.enter_context(altered(parameter, lambda v: torch.cat((v[1:2], v[:1], v[2:]))))
        yield


def _is_tied(anatomy: Anatomy) -> bool:
    head = anatomy.model.get_output_embeddings()
    return head is not None and head.weight is anatomy.model.get_input_embeddings().weight


def _head_untied(anatomy: Anatomy) -> Iterator[Site]:
    if _is_tied(anatomy):
        head = anatomy.model.get_output_embeddings()
        own = nn.Parameter(head.weight.detach().roll(1, dims=0))
        yield Site("head", lambda: attribute_set(head, "weight", own))


def _head_tied(anatomy: Anatomy) -> Iterator[Site]:
    head = anatomy.model.get_output_embeddings()
    if head is not None and not _is_tied(anatomy):
        yield Site("head", lambda: attribute_set(head, "weight", anatomy.model.get_input_embeddings().weight))


_KINDS = {
    "q": "of the query projection",
    "k": "of the key projection",
    "v": "of the value projection",
    "o": "of the attention's output projection",
    "mlp": "of an MLP projection",
    "norm": "of a norm",
    "head": "of the head",
    "router": "of the router",
    "experts": "of the experts",
}

WEIGHTS = (
    *(Mutation(f"bias.{kind}", f"the bias {what} dropped", _biases(kind)) for kind, what in _KINDS.items()),
    Mutation("weights.k-v-swapped", "key and value projections in each other's place", _key_value),
    Mutation("weights.q-k-swapped", "query and key projections in each other's place", _swapped("q", "k")),
    Mutation("weights.gate-up-swapped", "gate and up in each other's place", _gate_up),
    Mutation("experts.order", "the first two experts in each other's place", _expert_order),
    Mutation("head.untied", "a tied head with weights of its own", _head_untied),
    Mutation("head.tied", "the embedding used as a head that has its own weights", _head_tied),
)
