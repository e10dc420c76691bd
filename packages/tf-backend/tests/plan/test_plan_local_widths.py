"""Modules at the widths of one rank: what they leave behind, and sizes that their forwards spell."""

from __future__ import annotations

import fx_match
import pytest
import torch
from tf_backend.model.skeleton import skeleton
from tf_backend.plan import Parallel, Plan, plan
from tf_backend.plan.local_widths import check_at_local_widths, local_attributes
from tf_backend.plan.observe import ModuleCall
from tf_backend.plan.placement import Unplaced, place
from tf_backend.plan.schema import LocalAttribute, ModulePlan
from tf_tools.checkpoints import build_model
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

HIDDEN = 8


def planned(name: str, ranks: int, **overrides: object) -> Plan:
    config = build_model(name, overrides=overrides or None).config
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return plan(skeleton(config), Parallel(tensor=ranks))


HEADS_SPELLED = {
    "stablelm": "model.layers.0.self_attn",
    "opt": "model.decoder.layers.0.self_attn",
    "persimmon": "model.layers.0.self_attn",
}


@pytest.mark.parametrize("name", HEADS_SPELLED)
def test_sizes_spelled_in_a_forward_are_those_of_a_rank(name: str) -> None:
    sizes = {"opt": {"ffn_dim": 192, "word_embed_proj_dim": 128}, "stablelm": {"num_key_value_heads": 2}}
    found = planned(name, 2, **sizes.get(name, {}))
    assert found.is_served, [str(refusal) for refusal in found.refusals]
    (attention,) = [module for module in found.modules if module.name == HEADS_SPELLED[name]]
    local = {size.name: (size.whole, size.local) for size in attention.sizes}
    kv = {"num_key_value_heads": (2, 1)} if name == "stablelm" else {}
    assert local == {"num_heads": (4, 2), **kv}


class LeavesHeads(nn.Module):
    """Keeps what it computed in what it was called with, where another module may read it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, kept: dict[str, torch.Tensor]) -> torch.Tensor:
        kept["inner"] = self.first(x)
        return self.second(kept["inner"])


def test_a_split_value_that_is_left_where_others_read_it_is_refused() -> None:
    module, kept = LeavesHeads().to("meta"), {"other": torch.empty(1, device="meta")}
    call = ModuleCall((torch.empty(1, 5, HIDDEN, device="meta"), kept), {})
    styles = place(fx_match.trace(module, call.args), 2)
    with pytest.raises(Unplaced, match="leaves a value that would be split"):
        check_at_local_widths(module, ModulePlan("m", "keep"), call, styles, {}, 2)
    assert set(kept) == {"other"}


class SpellsItsScale(nn.Module):
    """Reads its number of heads for a view, and for a number that must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)

    def scale(self) -> float:
        return 1.0 / self.heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.first(x).view(1, 5, self.heads, 2) * self.scale()
        return self.second(heads.reshape(1, 5, -1))


class SpellsHeadsAlone(SpellsItsScale):
    def scale(self) -> float:
        return 0.25


class SpellsALiteral(SpellsItsScale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).view(1, 5, 4, 2).reshape(1, 5, -1))


def sizes_of(module: nn.Module) -> tuple[LocalAttribute, ...]:
    call = ModuleCall((torch.empty(1, 5, HIDDEN, device="meta"),), {})
    traced = fx_match.trace(module.to("meta"), call.args)
    return local_attributes(module, call, place(traced, 2), traced, 2)


def test_a_spelled_size_is_set_to_that_of_a_rank() -> None:
    assert sizes_of(SpellsHeadsAlone()) == (LocalAttribute("heads", 4, 2),)


def test_a_size_that_is_read_for_something_else_too_is_refused() -> None:
    with pytest.raises(Unplaced, match=r"`view` spells the size 4 .* `mul` would be given another number on a rank"):
        sizes_of(SpellsItsScale())


def test_a_size_that_no_attribute_gives_is_refused() -> None:
    with pytest.raises(Unplaced, match="no attribute of its own gives it"):
        sizes_of(SpellsALiteral())
