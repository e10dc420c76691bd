"""What structure alone says: which candidates belong to a module itself, and whether it looks like a block without a run.

In: a module. Out: its sites that no block further inside holds, and the number of experts if a router can be made out. Blocks
inside are told by structure because only the innermost one is worth a trace.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from moe_runner._experts import Site, inside, shape_of, sites_in, walk
from moe_runner._spelling import Mention, choices_spelled


def spelled_choices(module: nn.Module, site: Site | None = None) -> tuple[Mention, ...]:
    """Lines in `module` and near below it that spell a choice; not those of the experts' own modules."""
    return tuple(dict.fromkeys(mention for _, mentions in _choosers(module, site) for mention in mentions))


def expert_sites(module: nn.Module) -> list[Site]:
    """What looks like experts in `module` and does not belong to a block further inside; the most experts first."""
    near = list(walk(module))
    sites = sites_in(near)
    if not sites:
        return []
    claimed = [path for path, child in near if path and holds_block(child)]
    free = [(path, child) for path, child in near if not any(inside(path, c) for c in claimed)]
    return sites_in(free) if claimed else sites


def holds_block(module: nn.Module) -> bool:
    """Whether structure alone makes `module` a block: experts, a choice spelled near them, weights of a router."""
    return bool(spelled_choices(module)) and any(router_size(module, site) for site in expert_sites(module))


def router_size(module: nn.Module, site: Site) -> int | None:
    """E, if a module that spells a choice has a matrix that could give scores over the site's experts; else None.

    A top-k may lie beside the matrix (`module.gate`, `module.choose`); a maximum or a sort, which code is full of, may not.
    For packed parameters E is the one number of rows that divides them. A child that chooses may have a few more rows than
    there are experts: shared ones, or null ones that do nothing.
    """
    for path, mentions in _choosers(module, site):
        own = set(_matrices(module.get_submodule(path), path, site, depth=3 if path else 1))
        near = own
        if any(mention.is_top_k for mention in mentions):
            near = own | set(_matrices(module, "", site, depth=1 if path else 2))
        if site.num_experts is None:
            rows = min(site.sizes)
            fitting = {size for size, _ in near if 2 <= size < rows and rows % size == 0}
            if len(fitting) == 1:
                return fitting.pop()
            continue
        wider = site.storage == "stacked parameters" and path != ""
        if any(site.sizes.intersection(shape) for shape in near) or (
            wider and any(site.num_experts < rows < 2 * site.num_experts for rows, _ in own)
        ):
            return site.num_experts
    return None


def may_choose_unseen(module: nn.Module, site: Site) -> bool:
    """Whether stacked experts have a matrix beside them that could give their scores, though no choice is spelled near."""
    return site.storage == "stacked parameters" and any(
        site.sizes.intersection(shape) for shape in _matrices(module, "", site, depth=2) if site.num_experts is not None
    )


def _choosers(module: nn.Module, site: Site | None) -> Iterator[tuple[str, tuple[Mention, ...]]]:
    for path, child in walk(module):
        if (site is None or not path or not site.covers(path)) and (mentions := choices_spelled(child)):
            yield path, mentions


def _matrices(module: nn.Module, prefix: str, site: Site, depth: int) -> Iterator[tuple[int, int]]:
    """Shapes of the matrices in `module` and below it that are not the experts'."""
    for path, child in walk(module, depth, prefix):
        for name, parameter in child._parameters.items():
            shape = shape_of(parameter)
            if len(shape) == 2 and not site.covers(f"{path}.{name}" if path else name):
                yield shape[0], shape[1]
