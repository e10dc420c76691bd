"""A module at the widths of one rank, on meta: it must run, and give what the whole module gives in shape.

In: a module, how it is split, the forward that will run. Out: nothing, or Unplaced; and, where the forward spells sizes, which
attributes of the module give them. What is spelled is proved by a second trace: with those attributes at the rank's values, the forward
computes node by node what the whole one computes, but for those sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from ast_rewrite import CompiledRewrite
from fx_match import LeafCall, Trace, trace
from torch import fx, nn
from vllm_layers_bridge.layers.linear import qkv_split_sizes
from vllm_layers_bridge.layers.rotary import Rotary
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import ActivationAndMulSpec, AttentionSpec, MergedLinearSpec, QKVLinearSpec, RotarySpec

from tf_backend.generated import derive
from tf_backend.plan.modules import consumed_children
from tf_backend.plan.observe import ModuleCall
from tf_backend.plan.on_meta import HalfProduct, copied, fresh, meta_linear, prepare_calls, shapes
from tf_backend.plan.placement import Packed, Shards, Spelled, Styles, Unplaced, linear_sizes
from tf_backend.plan.schema import LocalAttribute, ModulePlan


def check_at_local_widths(
    module: nn.Module,
    plan: ModulePlan,
    call: ModuleCall,
    styles: Styles,
    rewrites: Mapping[str, CompiledRewrite],
    ranks: int,
    sizes: tuple[LocalAttribute, ...] = (),
    attention: Sequence[AttentionSpec] = (),
) -> None:
    """Run the forward that will run, at one rank's widths and with these calls of attention; Unplaced if it fails or gives other shapes."""
    kind = type(module)
    if plan.variant is not None and plan.variant in rewrites:
        kind = derive(kind, rewrites[plan.variant])
    local = _narrowed(module, kind, styles, ranks)
    _merge(local, module, plan, ranks)
    prepare_calls(local, attention)
    for size in sizes:
        local.__dict__[size.name] = size.local
    given, given_locally = ((fresh(call.args), fresh(call.kwargs)) for _ in range(2))
    try:
        expected = copied(module, type(module))(*given[0], **given[1])
        found = local(*given_locally[0], **given_locally[1])
    except Exception as error:  # whatever the model's own code raises, it does not run at these widths
        first = str(error).split("\n", 1)[0]
        raise Unplaced(
            f"its forward does not run at the widths of one rank: {type(error).__name__}: {first}"
        ) from error
    if shapes(expected) != shapes(found):
        raise Unplaced("it returns other shapes at the widths of one rank")
    if shapes(given) != shapes(given_locally):
        raise Unplaced("it leaves a value that would be split in what it was called with, where others read it")


def local_attributes(
    module: nn.Module, call: ModuleCall, styles: Styles, whole: Trace, ranks: int
) -> tuple[LocalAttribute, ...]:
    """The attributes of `module` that spell sizes of split axes, and their values on a rank.

    Raises:
        Unplaced: no attribute of its own does, or one that does is read for something else too.
    """
    if not styles.spelled:
        return ()
    spelled = f"`{styles.spelled[0].node.name}` spells the size {styles.spelled[0].whole} of an axis that would be split over ranks"
    if any(isinstance(state, Packed) for state in styles.states.values()):
        raise Unplaced(f"{spelled}, of a value that is part of a packed projection")
    problem = "no attribute of its own gives it"
    for sizes in _choices(module, styles.spelled, whole):
        local = _narrowed(module, type(module), styles, ranks)
        for size in sizes:
            local.__dict__[size.name] = size.local
        found = trace(local, call.args, call.kwargs, leaves=[LeafCall(attention_leaf)])
        difference = _difference(whole, found, styles)
        if difference is None:
            return sizes
        problem = difference
    raise Unplaced(f"{spelled}, and {problem}")


def _choices(module: nn.Module, spelled: tuple[Spelled, ...], whole: Trace) -> Iterator[tuple[LocalAttribute, ...]]:
    """Attributes that the forward read and that hold a spelled size, few at a time first."""
    locals_of = {size.whole: size.whole // size.pieces for size in spelled}
    names = [
        name
        for name, value in whole.reads.items()
        if type(value) is int and value in locals_of and name in vars(module)
    ]
    for count in range(1, min(len(names), 6) + 1):
        for chosen in itertools.combinations(names, count):
            whole_sizes = [vars(module)[name] for name in chosen]
            yield tuple(
                LocalAttribute(name, size, locals_of[size]) for name, size in zip(chosen, whole_sizes, strict=True)
            )


def _difference(whole: Trace, local: Trace, styles: Styles) -> str | None:
    """Where the forward at local widths computes something else than its share of the whole; None if nowhere."""
    pairs = dict[fx.Node, fx.Node]()
    ours, theirs = list(whole.graph.nodes), list(local.graph.nodes)
    for one, other in itertools.zip_longest(ours, theirs):
        if one is None or other is None or one.op != other.op or one.target != other.target:
            stop = local.stop.reason if local.stop is not None else "it takes another path there"
            return f"it does not do the same at the widths of one rank: {stop}"
        pairs[one] = other
        allowed = {size.position: size for size in styles.spelled if size.node is one}
        if not _alike(one, other, pairs, allowed):
            return f"`{one.name}` would be given another number on a rank"
        if one.op != "output" and not _has_share(whole.value(one), local.value(other), styles.states.get(one)):
            return f"`{one.name}` would be of another shape on a rank"
    return None


def _alike(one: fx.Node, other: fx.Node, pairs: dict[fx.Node, fx.Node], allowed: dict[int, Spelled]) -> bool:
    """Whether two nodes take the same, but for the sizes that are spelled."""
    ours, theirs = _flat((one.args, one.kwargs)), _flat((other.args, other.kwargs))
    if len(ours) != len(theirs):
        return False
    first = len(ours) - len(_flat(one.args[1:])) - len(_flat(one.kwargs))
    for at, (mine, their) in enumerate(zip(ours, theirs, strict=True)):
        size = allowed.get(at - first)
        if isinstance(mine, fx.Node):
            same = isinstance(their, fx.Node) and pairs.get(mine) is their
        elif size is not None:
            same = mine == size.whole and their == size.whole // size.pieces
        elif isinstance(mine, nn.Module):
            same = isinstance(their, nn.Module)
        else:
            same = type(mine) is type(their) and bool(mine == their)
        if not same:
            return False
    return True


def _flat(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _flat(item)]
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in (key, *_flat(item))]
    if isinstance(value, slice):
        return ["slice", *_flat((value.start, value.stop, value.step))]
    return [value]


def _has_share(whole: object, local: object, state: object) -> bool:
    """Whether a tensor at local widths is of the shape that its state says."""
    if not isinstance(whole, torch.Tensor) or not isinstance(local, torch.Tensor):
        return True
    shape = list(whole.shape)
    if isinstance(state, Shards):
        shape[state.axis] //= state.pieces
    return shape == list(local.shape)


def _narrowed(module: nn.Module, kind: type[nn.Module], styles: Styles, ranks: int) -> nn.Module:
    """A copy of `module` of class `kind`, its own linears, norms and parameters as wide as on one rank."""
    local = copied(module, kind)
    for name, child in module.named_children():
        sizes = linear_sizes(child)
        if name in styles.column and sizes is not None:
            local._modules[name] = meta_linear(sizes[0], _width(styles, name, sizes[1] // ranks), child)
        elif name in styles.row and sizes is not None:
            local._modules[name] = meta_linear(sizes[0] // ranks, sizes[1], child)
        elif name in styles.norms:
            local._modules[name] = nn.Identity()
    for path, shard in styles.parameters.items():
        owner = local
        for part in path.split(".")[:-1]:
            below = owner.get_submodule(part)
            inner = copied(below, type(below))
            owner._modules[part] = inner
            owner = inner
        leaf = path.rpartition(".")[2]
        whole = owner._parameters[leaf]
        assert whole is not None
        shape = list(whole.shape)
        shape[shard.axis] //= shard.pieces
        owner._parameters[leaf] = nn.Parameter(
            torch.empty(shape, dtype=whole.dtype, device="meta"), requires_grad=False
        )
    return local


def _width(styles: Styles, name: str, equal: int) -> int:
    """Output features of a projection on a rank: of key and value heads that ranks outnumber, more than an equal share."""
    node = next(node for node in styles.states if node.op == "call_module" and node.target == name)
    state, value = styles.states[node], node.meta.get("val")
    if isinstance(value, torch.Tensor) and not isinstance(state, Packed):
        return int(value.shape[-1]) // (state.pieces if isinstance(state, Shards) else 1)
    return equal


def _merge(local: nn.Module, module: nn.Module, plan: ModulePlan, ranks: int) -> None:
    """Put stand-ins for the layers of `plan` in the place of the children that they take over."""
    for layer in plan.layers:
        like = next((module.get_submodule(child) for child in consumed_children(layer)), None)
        for taken in consumed_children(layer):
            local._modules.pop(taken, None)
        if isinstance(layer, QKVLinearSpec):
            widths = qkv_split_sizes(layer, ranks)
            local.__dict__[layer.sizes_attribute] = widths
            local._modules[layer.name] = meta_linear(layer.in_features, sum(widths), like)
        elif isinstance(layer, MergedLinearSpec):
            if any(source.size % ranks for source in layer.sources):
                raise Unplaced(f"{ranks} ranks do not divide the parts of `{layer.name}`")
            total = sum(source.size for source in layer.sources) // ranks
            local._modules[layer.name] = meta_linear(layer.in_features, total, like)
        elif isinstance(layer, ActivationAndMulSpec):
            local._modules[layer.name] = HalfProduct()
        elif isinstance(layer, RotarySpec):
            local._modules[layer.name] = Rotary(layer)
