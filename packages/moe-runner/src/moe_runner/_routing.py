"""How a block routes: which choice leads to the experts, what they are given, what runs beside them.

In: the dataflow of a traced block, the site of its experts and the nodes that use them (none, if the trace stopped before).
"""

from __future__ import annotations

import torch
from torch import fx

from moe_runner._choice import Choice, choices
from moe_runner._dataflow import Dataflow
from moe_runner._experts import Site
from moe_runner._structure import may_choose_unseen


def router_choices(flow: Dataflow, site: Site, uses: list[fx.Node]) -> list[Choice]:
    """Choices over the experts' scores that are made before the experts run and that reach them, in order."""
    joined = _joined(flow, uses)
    for everywhere in (False, True):
        found = [c for c in choices(flow, site, everywhere=everywhere) if _routes(c, site, flow, uses, joined)]
        if found or not may_choose_unseen(flow.trace.module, site):
            break
    ranked = ([c for c in found if c.by_index and c.op == "topk"], [c for c in found if c.by_index], found)
    return next((rank for rank in ranked if rank), [])


def _routes(choice: Choice, site: Site, flow: Dataflow, uses: list[fx.Node], joined: set[fx.Node]) -> bool:
    if choice.node in joined or (uses and joined.isdisjoint(flow.after(choice.node))):
        return False
    return _fits(choice, site, flow, uses)


def _joined(flow: Dataflow, uses: list[fx.Node]) -> set[fx.Node]:
    """The uses of the experts and what is computed from them; to be returned side by side is not to be joined."""
    return {node for node in flow.after(*uses) if node.op != "output"}


def _fits(choice: Choice, site: Site, flow: Dataflow, uses: list[fx.Node]) -> bool:
    if site.num_experts is None:
        rows = min(site.sizes)
        return 2 <= choice.candidates < rows and rows % choice.candidates == 0
    if choice.candidates in site.sizes:
        return True
    # More scores than experts: some choices lead to none (identity or null experts). Then the experts must be given them.
    return choice.candidates > site.num_experts and choice.node in flow.before(*_sources(uses))


def _sources(uses: list[fx.Node]) -> list[fx.Node]:
    return [source for use in uses for source in use.all_input_nodes]


def given_per_token(flow: Dataflow, uses: list[fx.Node], choice: Choice) -> int | None:
    """Experts per token as the experts are given them: the last dimension of [tokens, k] indices that come from the choice.

    None where that is the number of scores, which a mask [tokens, E] has too.
    """
    chosen = flow.after(choice.node)
    for node in _sources(uses):
        indices = flow.tensor(node)
        if node in chosen and indices is not None and indices.dtype in (torch.int64, torch.int32) and indices.dim() > 1:
            return int(indices.shape[-1]) if indices.shape[-1] != choice.candidates else None
    return None


def shared_experts(flow: Dataflow, site: Site, choice: Choice, uses: list[fx.Node]) -> str | None:
    """A child with weights that runs beside the experts, decides nothing about the choice, and whose result joins theirs."""
    joined, deciding = _joined(flow, uses), flow.before(choice.node)
    for node in flow.trace.graph.nodes:
        if node.op != "call_module" or site.covers(str(node.target)) or node in joined or node in deciding:
            continue
        matrices = sum(parameter.dim() >= 2 for parameter in flow.child(node).parameters())
        if matrices >= 2 and not joined.isdisjoint(flow.after(node)):
            return str(node.target)
    return None


def returns_scores(flow: Dataflow, choice: Choice, uses: list[fx.Node]) -> bool:
    """Whether a returned tensor has a score for each expert in its last dimension and belongs to the choice."""
    related = (flow.before(choice.node) | flow.after(choice.node)) - _joined(flow, uses)
    returned = next(node for node in flow.trace.graph.nodes if node.op == "output").all_input_nodes
    return len(returned) > 1 and any(node in related and flow.last_size(node) == choice.candidates for node in returned)
