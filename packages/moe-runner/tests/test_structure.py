"""Candidates by shape, whose they are, and how many experts a router's matrix tells."""

from __future__ import annotations

import torch
from moe_runner._experts import Site, sites_in, walk
from moe_runner._structure import expert_sites, holds_block, router_size
from torch import Tensor, nn


class Params(nn.Module):
    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))


class Chooser(Params):
    def forward(self, x: Tensor) -> Tensor:
        return torch.topk(x @ self.w.T, 2).indices


class Plain(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def mlp(size: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, size), nn.Linear(size, 4))


def site_of(module: nn.Module) -> Site:
    (site,) = sites_in(list(walk(module)))
    return site


def test_stacked_parameters_in_a_child_in_two_children_and_in_the_module() -> None:
    one = site_of(Plain(x=Params(a=(3, 8, 4), b=(3, 4, 8), bias=(3, 4))))
    assert (one.name, one.num_experts, one.members) == ("x", 3, ("x.a", "x.b"))
    two = site_of(Plain(x=Params(a=(3, 8, 4)), y=Params(a=(3, 4, 8))))
    assert (two.name, two.num_experts, two.members) == ("", 3, ("x.a", "y.a"))
    assert site_of(Params(a=(3, 8, 4), b=(3, 4, 8))).name == ""


def test_one_parameter_one_expert_or_different_owners_and_sizes_are_no_candidate() -> None:
    for module in (
        Params(a=(3, 8, 4)),
        Params(a=(1, 8, 4), b=(1, 4, 8)),
        Plain(x=Params(a=(3, 8, 4)), y=Params(a=(5, 4, 8))),
        Params(a=(3, 8, 4), b=(3, 4)),
    ):
        assert sites_in(list(walk(module))) == []


def test_the_larger_stack_comes_first_and_rows_for_null_experts_belong_to_it() -> None:
    sites = sites_in(list(walk(Plain(few=Params(a=(2, 8, 4), b=(2, 4, 8)), many=Params(a=(6, 8, 4), b=(6, 4, 8))))))
    assert [site.num_experts for site in sites] == [6, 2]
    null = site_of(Params(a=(9, 8, 4), b=(6, 4, 8)))
    assert (null.num_experts, null.sizes) == (6, {6, 9})


def test_a_list_of_like_mlps_and_lists_that_are_not() -> None:
    listed = site_of(Plain(x=nn.ModuleList([mlp(), mlp(), nn.Identity()])))
    assert (listed.name, listed.num_experts, listed.storage) == ("x", 2, "module list")
    named = site_of(Plain(x=nn.ModuleDict({"a": mlp(), "b": mlp()})))
    assert named.members == ("x.a", "x.b")
    for modules in ([mlp()], [mlp(), mlp(6)], [nn.Linear(4, 8), nn.Linear(4, 8)], [mlp(), nn.Linear(4, 8)]):
        assert sites_in(list(walk(Plain(x=nn.ModuleList(modules))))) == []


def test_packed_matrices_leave_the_number_to_a_router() -> None:
    block = Plain(x=Params(a=(12, 4), b=(12, 4)), r=Chooser(w=(3, 4)))
    (site,) = expert_sites(block)
    assert site.num_experts is None
    assert router_size(block, site) == 3
    assert router_size(Plain(x=block.x, r=Chooser(w=(5, 4))), site) is None


def test_a_router_may_have_rows_for_null_experts_but_not_any_number() -> None:
    for rows, known in ((6, True), (7, True), (11, True), (12, False), (5, False)):
        block = Plain(x=Params(a=(6, 8, 4), b=(6, 4, 8)), r=Chooser(w=(rows, 4)))
        assert (router_size(block, expert_sites(block)[0]) == 6) is known
        assert holds_block(block) is known


def test_without_a_choice_nothing_is_a_block() -> None:
    assert not holds_block(Plain(x=Params(a=(6, 8, 4), b=(6, 4, 8)), r=Params(w=(6, 4))))


class Picker(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        return scores.topk(2).indices


def test_a_top_k_may_lie_beside_the_matrix_and_not_in_another_part() -> None:
    experts = Params(a=(6, 8, 4), b=(6, 4, 8))
    assert holds_block(Plain(x=experts, gate=nn.Linear(4, 6), pick=Picker()))
    layer = Plain(attention=Plain(index=Picker()), mlp=Plain(x=experts, gate=nn.Linear(4, 6)))
    assert not holds_block(layer)
    assert not holds_block(layer.mlp)


def test_experts_of_a_block_inside_are_not_the_outer_modules() -> None:
    block = Plain(x=Params(a=(6, 8, 4), b=(6, 4, 8)), r=Chooser(w=(6, 4)))
    assert expert_sites(Plain(inner=block)) == []
    assert expert_sites(Plain(inner=Plain(x=block.x, r=nn.Identity())))[0].name == "inner.x"


def test_a_site_covers_its_members_and_the_way_to_them() -> None:
    site = site_of(Plain(x=Params(a=(3, 8, 4), b=(3, 4, 8))))
    assert site.covers("x")
    assert site.covers("x.a")
    assert not site.covers("x.bias")
    assert not site.covers("xx")
