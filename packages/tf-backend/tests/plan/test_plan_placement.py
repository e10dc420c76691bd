"""Placement over tensor-parallel ranks: what is split, what stays whole and why, and what is refused."""

from __future__ import annotations

import fx_match
import pytest
import torch
from fx_match import LeafCall
from tf_backend import capabilities
from tf_backend.model.skeleton import skeleton
from tf_backend.plan import Parallel, Plan, plan
from tf_backend.plan.placement import OwnShard, Part, Styles, Unplaced, place
from tf_backend.plan.planner import make_plan
from tf_tools.checkpoints import build_model
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import LayerSpec, LinearSpec, MergedLinearSpec, QKVLinearSpec, RMSNormSpec

HIDDEN, INNER = 8, 12


def planned_config(name: str, **overrides: object) -> PreTrainedConfig:
    config = build_model(name, overrides=overrides or None).config
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return config


def planned(name: str, ranks: int, **overrides: object) -> Plan:
    return plan(skeleton(planned_config(name, **overrides)), Parallel(tensor=ranks))


def placed(module: nn.Module, ranks: int = 2, heads: tuple[tuple[int, int], ...] = ()) -> Styles:
    inputs = (torch.empty(1, 5, HIDDEN, device="meta"),)
    return place(fx_match.trace(module.to("meta"), inputs, leaves=[LeafCall(attention_leaf)]), ranks, heads)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, INNER)
        self.second = nn.Linear(INNER, HIDDEN)
        self.scale = nn.Parameter(torch.ones(INNER))
        self.norm = nn.LayerNorm(INNER)


class Plain(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)) * 2.0)


class ScaledPerFeature(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.scale)


class NormedAcross(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


class Softmaxed(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).softmax(-1))


class ReadsTheSize(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)
        return self.second(inner / inner.shape[-1])


class BranchesOnTheSize(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)
        return self.second(inner if inner.shape[-1] > 8 else inner * 2.0)


class BranchesOnTheTokens(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)
        return self.second(inner) if x.shape[1] > 1 else self.second(inner + self.first.weight.mean())


class ScaledTwice(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.scale) * self.scale.sum()


class WritesWhole(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)
        room = x.new_empty(1, 5, INNER)
        room.copy_(inner)
        return self.second(room)


class WritesItsOwn(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)
        room = x.new_empty(*x.shape[:-1], inner.shape[-1])
        room.copy_(inner)
        return self.second(room)


class MergesWithTokens(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).transpose(1, 2).reshape(1, 5, -1))


class LowRank(nn.Module):
    """A projection through a normed bottleneck: what lies before the norm stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(HIDDEN, 4)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, INNER)
        self.out = nn.Linear(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.up(self.norm(self.down(x)))))


class ReturnsInner(TwoLayers):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = self.first(x)
        return self.second(inner), inner


class Unpaired(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).sum(-1, keepdim=True) + x


class SlicesFeatures(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)
        return self.second(torch.cat((inner[..., :4], inner[..., 4:]), dim=-1))


class PackedHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(HIDDEN, 2 * INNER)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.both(x)
        return self.down(both[..., :INNER] * torch.tanh(both[..., INNER:]))


class WritesInPlace(TwoLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)
        inner[..., 0] = 0.0
        return self.second(inner)


def test_a_pair_of_linears_is_split_on_outputs_then_on_inputs() -> None:
    styles = placed(Plain())
    assert (styles.column, styles.row) == ({"first"}, {"second"})


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (NormedAcross, "is a norm over all the features"),
        (Softmaxed, "(softmax) is over the axis"),
        (ReadsTheSize, "reads the size of an axis"),
        (BranchesOnTheSize, "its path hangs on"),
        (BranchesOnTheTokens, "its path hangs on"),
        (ScaledTwice, "with `scale`, which is whole"),
        (WritesWhole, "writes in place a value that would be split into one that is whole"),
        (MergesWithTokens, "in a way that does not keep its parts"),
        (ReturnsInner, "it returns"),
        (Unpaired, "(sum)"),
        (SlicesFeatures, "takes parts of a value along the axis"),
        (WritesInPlace, "writes in place to parts"),
    ],
)
def test_what_cannot_be_proved_is_not_split(module: type[nn.Module], reason: str) -> None:
    with pytest.raises(Unplaced) as caught:
        placed(module())
    assert reason in str(caught.value)


def test_a_parameter_beside_the_features_is_split_with_them() -> None:
    styles = placed(ScaledPerFeature())
    assert styles.parameters == {"scale": OwnShard(0, 2)}


def test_what_feeds_a_norm_over_all_features_stays_whole() -> None:
    styles = placed(LowRank())
    assert (styles.whole, styles.column, styles.row) == ({"down"}, {"up"}, {"out"})


def test_memory_of_a_ranks_own_size_may_be_written() -> None:
    assert placed(WritesItsOwn()).row == {"second"}


def test_parts_of_one_weight_are_split_each_for_itself() -> None:
    module = PackedHalves().to("meta")
    traced = fx_match.trace(module, (torch.empty(1, 5, HIDDEN, device="meta"),))
    styles = place(traced, 2, (), {"both": (Part(0, INNER, 2), Part(INNER, 2 * INNER, 2))})
    assert (styles.column, styles.row) == ({"both"}, {"down"})
    with pytest.raises(Unplaced, match="other parts"):
        place(traced, 2, (), {"both": (Part(0, 4, 2), Part(4, 2 * INNER, 2))})


def test_ranks_that_do_not_divide_the_features() -> None:
    with pytest.raises(Unplaced, match="5 ranks do not divide"):
        placed(Plain(), ranks=5)


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "mistral", "smollm3", "gemma2", "granite", "phi", "phi3", "glm4", "gpt2"]
)
def test_attention_and_mlp_are_split(name: str) -> None:
    found = planned(name, 2)
    assert found.is_served, [str(refusal) for refusal in found.refusals]
    assert {record.placement for record in found.placement} == {"split"}
    styles = [
        layer.style
        for module in found.modules
        for layer in module.layers
        if isinstance(layer, LinearSpec | MergedLinearSpec)
    ]
    assert "replicated" not in styles
    assert "row" in styles


def test_key_value_heads_fewer_than_ranks_are_repeated() -> None:
    found = planned("llama", 4, num_key_value_heads=2)
    assert found.is_served
    assert any(
        isinstance(layer, QKVLinearSpec) and layer.num_kv_heads == 2 for m in found.modules for layer in m.layers
    )


def test_a_single_key_value_head_is_repeated() -> None:
    assert planned("llama-biased", 2, num_key_value_heads=1).is_served


def test_heads_that_ranks_do_not_divide_are_refused() -> None:
    found = planned("llama", 3)
    assert not found.is_served
    assert "4 heads cannot be split over 3 ranks" in str(found.refusals[0])
    assert "LlamaAttention" in str(found.refusals[0])


def layers_of(found: Plan, kind: type[LayerSpec]) -> dict[str, LayerSpec]:
    return {m.name: layer for m in found.modules for layer in m.layers if isinstance(layer, kind)}


@pytest.mark.parametrize(("ranks", "kv_heads", "pieces"), [(2, 2, (2, 2)), (4, 2, (4, 2)), (2, 1, (2, 1))])
def test_norms_over_all_heads_take_their_mean_over_ranks(ranks: int, kv_heads: int, pieces: tuple[int, int]) -> None:
    found = planned("olmo2", ranks, num_key_value_heads=kv_heads)
    assert found.is_served, [str(refusal) for refusal in found.refusals]
    norms = layers_of(found, RMSNormSpec)
    query, key = (norms[f"model.layers.0.self_attn.{name}"] for name in ("q_norm", "k_norm"))
    assert isinstance(query, RMSNormSpec)
    assert isinstance(key, RMSNormSpec)
    assert (query.pieces, key.pieces) == pieces
    assert (query.hidden_size, key.hidden_size) == (128, 32 * kv_heads)
    others = [layer for name, layer in norms.items() if "self_attn" not in name]
    assert {layer.pieces for layer in others if isinstance(layer, RMSNormSpec)} == {1}


def test_one_rank_has_no_placement() -> None:
    assert planned("llama", 1).placement == ()


class TwoCalls(nn.Module):
    """Attends twice and sums: each call is split by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def values(self, v: torch.Tensor) -> torch.Tensor:
        return v * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (proj(x).view(1, 5, -1, 2).transpose(1, 2) for proj in (self.q, self.k, self.v))
        one, two = attention_leaf(self, q, k, v)[0], attention_leaf(self, q, k, self.values(v))[0]
        return self.out((one - two).reshape(1, 5, -1))


class TwoHalves(TwoCalls):
    """As differential attention does it: values of other heads, which are on another rank."""

    def values(self, v: torch.Tensor) -> torch.Tensor:
        first, second = v.chunk(2, dim=1)
        return torch.cat((second, first), dim=1)


def test_several_calls_of_attention_are_split_by_heads_alike() -> None:
    styles = placed(TwoCalls(), heads=((4, 4), (4, 4)))
    assert (styles.column, styles.row) == ({"q", "k", "v"}, {"out"})


def test_calls_that_take_heads_of_other_ranks_are_refused() -> None:
    with pytest.raises(Unplaced, match="chunk"):
        placed(TwoHalves(), heads=((4, 4), (4, 4)))
    (refusal,) = planned("diffllama", 2).refusals
    assert "`DiffLlamaAttention` cannot be split over 2 ranks: `chunk`" in refusal.reason


def test_low_rank_projections_stay_whole() -> None:
    latent = {"kv_lora_rank": 64, "q_lora_rank": 48, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    found = planned("minicpm3", 2, num_key_value_heads=4, **latent)
    assert found.is_served, [str(refusal) for refusal in found.refusals]
    linears = layers_of(found, LinearSpec)
    styles = {
        name: linears[f"model.layers.1.self_attn.{name}"]
        for name in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj")
    }
    found_styles = {name: layer.style for name, layer in styles.items() if isinstance(layer, LinearSpec)}
    assert found_styles == {
        "q_a_proj": "replicated",
        "kv_a_proj_with_mqa": "replicated",
        "q_b_proj": "column",
        "o_proj": "row",
    }
    (record,) = [record for record in found.placement if record.cls == "MiniCPM3Attention"]
    assert record.replicated_parameters == 2 * 128 * (48 + 64 + 32)
    assert record.notes == ("`kv_a_proj_with_mqa`, `q_a_proj`: whole on every rank",)


def test_a_weight_for_each_head_is_split_with_the_heads() -> None:
    found = planned("cohere", 2, use_qk_norm=True, pad_token_id=0)
    assert found.is_served, [str(refusal) for refusal in found.refusals]
    (attention,) = [module for module in found.modules if module.name == "model.layers.0.self_attn"]
    assert {shard.name: (shard.axis, shard.pieces) for shard in attention.shards} == {
        "q_norm.weight": (0, 2),
        "k_norm.weight": (0, 2),
    }


class RepeatsOneHead(nn.Module):
    """One rotary part for all heads, as latent attention has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.second = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.first(x).view(1, 5, -1, 2)
        part = x[:, :, None, :2].expand(1, 5, heads.shape[2], 2)
        return self.second(torch.cat((heads, part), dim=-1).reshape(1, 5, -1))


def test_a_whole_value_is_repeated_for_the_heads_of_a_rank() -> None:
    assert placed(RepeatsOneHead()).row == {"second"}


class SumsWhatSeveralHold(nn.Module):
    """Key-value heads that go straight into the output projection: several ranks would add the same."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = nn.Linear(HIDDEN, 4)
        self.out = nn.Linear(4, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.kv(x)))


def test_what_several_ranks_hold_is_not_summed_over_them() -> None:
    traced = fx_match.trace(SumsWhatSeveralHold().to("meta"), (torch.empty(1, 5, HIDDEN, device="meta"),))
    with pytest.raises(Unplaced, match="would sum over ranks what several of them hold"):
        place(traced, 4, (), {"kv": (Part(0, 4, 2),)})


def test_transformers_own_plan_is_told_where_numbers_would_differ() -> None:
    config = build_model("phi3").config
    config.architectures = ["Phi3ForCausalLM"]
    assert all(record.notes == () for record in plan(skeleton(config), Parallel(tensor=2)).placement)
    config.base_model_tp_plan = {
        "layers.*.self_attn.qkv_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_up_proj": "packed_colwise",
        "layers.*.mlp.down_proj": "colwise",
    }
    found = {record.cls: record.notes for record in plan(skeleton(config), Parallel(tensor=2)).placement}
    assert found == {
        "Phi3Attention": (
            "`qkv_proj`: transformers' own plan (`colwise`) splits its outputs; the graph shows that the outputs of each of its "
            "projections are to be split",
        ),
        "Phi3MLP": (
            "`down_proj`: transformers' own plan (`colwise`) splits its outputs; the graph shows that its inputs are to be split",
        ),
    }


def test_projections_that_are_not_merged_are_repeated_too() -> None:
    model = skeleton(planned_config("llama", num_key_value_heads=2))
    found = make_plan(model, Parallel(tensor=4), capabilities.shipped(), fusions=()).plan
    assert found.is_served, [str(refusal) for refusal in found.refusals]
    linears = layers_of(found, LinearSpec)
    key, query = (linears[f"model.layers.0.self_attn.{part}_proj"] for part in "kq")
    assert isinstance(key, LinearSpec)
    assert isinstance(query, LinearSpec)
    assert (key.style, key.runs, key.copies) == ("column", 2, 2)
    assert (query.style, query.runs, query.copies) == ("column", None, 1)
    rules = {rule.source: (rule.runs, rule.copies) for rule in found.weights}
    assert rules["model.layers.0.self_attn.k_proj.weight"] == (2, 2)
    assert rules["model.layers.0.self_attn.q_proj.weight"] == (1, 1)
