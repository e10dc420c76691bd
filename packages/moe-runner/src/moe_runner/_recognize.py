"""`recognize`: whether a module is a sparse mixture-of-experts block, and what can be read about it.

A block is the innermost module that holds both experts and the choice among them. Candidates are found by structure
(`_experts`), then the forward is traced with what it was really called with, and the choice must be seen to reach the experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fx_match import FxMatchError, LeafCall, Trace, trace
from torch import fx, nn

from moe_runner._block import SparseBlock
from moe_runner._choice import place_of, score_of
from moe_runner._dataflow import Dataflow
from moe_runner._errors import ModuleTypeError
from moe_runner._experts import Site
from moe_runner._numbers import bare
from moe_runner._routing import given_per_token, returns_scores, router_choices, shared_experts
from moe_runner._structure import expert_sites, may_choose_unseen, router_size, spelled_choices


def recognize(
    module: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> SparseBlock | None:
    """Describe `module` if it is a sparse mixture-of-experts block, the innermost one; None if it is not.

    args, kwargs: what the module is called with, tensors on meta (or anywhere: nothing is computed). Both empty: it was
        never called, so structure decides alone and what only a run could tell is None.

    Names of classes, children and parameters decide nothing. Whatever the module does is not raised.
    Raises ModuleTypeError if `module` is no `nn.Module`.
    """
    if not isinstance(module, nn.Module):
        raise ModuleTypeError(
            f"recognize() found {type(module).__name__}, expected an nn.Module. Pass the module itself, not its name."
        )
    if "forward" in vars(module):
        module = bare(module)
    called = bool(args or kwargs)
    for site in expert_sites(module):
        if not spelled_choices(module, site) and not (called and may_choose_unseen(module, site)):
            continue
        if (block := _block(module, site, args, dict(kwargs or {}))) is not None:
            return block
    return None


def _block(module: nn.Module, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SparseBlock | None:
    if not args and not kwargs:
        return _from_structure(module, site, "the block was never called: read from its structure alone", called=False)
    try:
        traced = trace(module, args, kwargs, leaves=_leaves(module, site))
    except FxMatchError as error:
        return _from_structure(module, site, f"the block could not be traced: {error}", called=True)
    return _from_trace(module, site, traced)


def _from_structure(module: nn.Module, site: Site, why: str, *, called: bool) -> SparseBlock | None:
    experts = router_size(module, site)
    if experts is None:
        return None
    return SparseBlock(
        experts=site.name,
        num_experts=experts,
        storage=site.storage,
        parameters=site.parameters,
        top_k=None,
        score=None,
        score_order=None,
        shared_experts=None,
        returns_router_logits=None,
        called=called,
        evidence=(why, _site_line(module, site), *(str(mention) for mention in spelled_choices(module, site))),
    )


def _from_trace(module: nn.Module, site: Site, traced: Trace) -> SparseBlock | None:
    flow = Dataflow(traced)
    uses = [node for node in traced.graph.nodes if _uses(site, node)]
    if site.storage == "module list" and _run_in_sequence(flow, uses, site):
        return None
    found = router_choices(flow, site, uses)
    if not found:
        if traced.complete:
            return None
        return _from_structure(module, site, f"the forward could be followed only to {_stop(traced)}", called=True)
    choice = found[-1]
    score, order = score_of(choice, choice.candidates, flow.after(*uses))
    evidence = [_site_line(module, site), f"choice: {choice.place}"]
    evidence += [f"experts used: {place_of(flow, uses[0])}"] if uses else []
    evidence += [] if traced.complete else [f"not followed beyond {_stop(traced)}"]
    return SparseBlock(
        experts=site.name,
        num_experts=site.num_experts or choice.candidates,
        storage=site.storage,
        parameters=site.parameters,
        top_k=choice.count if len(found) == 1 and choice.count else given_per_token(flow, uses, choice),
        score=score,
        score_order=order,
        shared_experts=shared_experts(flow, site, choice, uses),
        returns_router_logits=returns_scores(flow, choice, uses) if traced.complete else None,
        called=True,
        evidence=tuple(evidence),
        num_scores=choice.candidates,
    )


def _uses(site: Site, node: fx.Node) -> bool:
    if node.op == "call_module":
        return site.covers(str(node.target))
    return node.op == "get_attr" and any(str(node.target) == name for name in site.parameters)


def _run_in_sequence(flow: Dataflow, uses: list[fx.Node], site: Site) -> bool:
    """Whether one element of the list runs on what another gave, as layers do."""
    calls = [node for node in uses if node.op == "call_module" and str(node.target) != site.name]
    return any(not flow.before(*node.all_input_nodes).isdisjoint(set(calls) - {node}) for node in calls)


def _leaves(module: nn.Module, site: Site) -> list[LeafCall]:
    """The modules of the experts, run on meta where that works and passed by where it needs the data of a tensor."""
    owners = {name if site.storage == "module list" else name.rpartition(".")[0] for name in site.members}
    paths = {".".join(owner.split(".")[: i + 1]) for owner in owners if owner for i in range(owner.count(".") + 1)}
    classes = dict.fromkeys(type(module.get_submodule(path)) for path in sorted(paths))
    return [LeafCall(cls, run_or_pass) for cls in classes]


def run_or_pass(child: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What `child` returns on meta; where it needs the data of a tensor, its first tensor of numbers: experts keep its shape."""
    states = (*child.named_parameters(), *child.named_buffers())
    try:
        if all(state.is_meta for _, state in states):
            return child(*args, **kwargs)
        on_meta = {name: torch.empty_like(state, device="meta") for name, state in states}
        return torch.func.functional_call(child, on_meta, args, kwargs)
    except Exception:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return torch.empty_like(value)
        raise


def _site_line(module: nn.Module, site: Site) -> str:
    if site.storage == "module list":
        return f"experts: {len(site.members)} modules with the same parameters in `{site.name}`"
    state = dict(module.named_parameters())
    return "experts: " + ", ".join(f"`{name}` {list(state[name].shape)}" for name in site.parameters)


def _stop(traced: Trace) -> str:
    if traced.stop is None:
        return "its end"
    location = traced.stop.location
    return f"line {location.line or '?'} of `{traced.module_class.__qualname__}` ({traced.stop.reason})"
