"""Attention that is cached expanded where the engine's cache is laid out for latents: what is said, and what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tf_backend.errors import OptionRefused
from tf_backend.model import latent
from tf_backend.plan.schema import AttentionPlan, LatentPlan, Parallel, Plan, Provenance
from vllm_layers_bridge.specs import AttentionSpec

REASON = "vLLM caches latents for certain types of models, and this type is none of those"


class Expanded:
    """A backend of the engine that takes blocks of 32 tokens."""

    @staticmethod
    def supports_block_size(block: int) -> bool:
        return block == 32

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


def _plan() -> Plan:
    provenance = Provenance("A", "a", "0", "5", "2", {}, "cpu", "0", Parallel())
    attention = (AttentionPlan("model.layers.0.self_attn", 0, AttentionSpec(4, 4, 64, 64, 0.125)),)
    kept = (LatentPlan("ToyAttention", 1, 512, 64, 768, 576, REASON),)
    return Plan(provenance, "model", "model.layers", (), (), attention, None, (), (), latent=kept)


def _config(backend: str | None, block: int, *, use_mla: bool = True) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(use_mla=use_mla),
        cache_config=SimpleNamespace(block_size=block),
        attention_config=SimpleNamespace(backend=backend and SimpleNamespace(name=backend)),
    )


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "_backend", lambda *_, **__: Expanded)


@pytest.mark.parametrize("chosen", ["CPU_MLA", None])
def test_both_remedies_are_told_and_the_reason_once(chosen: str | None) -> None:
    with pytest.raises(OptionRefused) as refused:
        latent.check_expanded(_config(chosen, 16), _plan())
    said = str(refused.value)
    assert said.count(REASON) == 1
    assert "blocks of 16 tokens" in said
    assert "Set VLLM_MLA_DISABLE=1" in said
    assert ("leave out `--attention-backend CPU_MLA`" in said) is (chosen is not None)


def test_blocks_that_are_taken_and_no_latent_attention_pass() -> None:
    latent.check_expanded(_config("CPU_MLA", 32), _plan())
    latent.check_expanded(_config(None, 16, use_mla=False), _plan())
