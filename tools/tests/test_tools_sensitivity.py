"""Each fault that a recipe can have is seen by the oracle, and none is looked for in vain."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from tf_tools.checkpoints import RECIPES
from tf_tools.compare import TOLERANCE, compare_run
from tf_tools.mutations import MUTATIONS, Anatomy
from tf_tools.reference import load_reference, logprobs_of, serve_with_transformers
from tf_tools.sensitivity import VISIBLE, Effect, float32_noise, main, probe_prompts, sensitivity

Checkpoint = Callable[[str], Path]

# Written by hand from each architecture's definition: a mutation that stops to apply without a sign fails here.
ALL = frozenset(
    {"attention.scale", "norm.eps", "norm.weight", "residual.dropped", "weights.k-v-swapped"}
    | {"rotary.dropped", "rotary.dropped-in-layer", "rotary.frequencies", "rotary.pairs"}
)
GATED = ALL | {"activation.swapped", "attention.kv-head-order", "norm.offset-added", "weights.gate-up-swapped"}
QKV_BIAS = {"bias.q", "bias.k", "bias.v"}
WINDOW = {"window.dropped", "window.wide", "window.narrow"}
EXPERTS = {"experts.order", *(m.name for m in MUTATIONS if m.name.startswith("router."))}
EXPECTED: dict[str, frozenset[str]] = {
    "llama": GATED | {"head.tied"},
    "llama-tied": GATED | {"head.untied"},
    "llama-biased": GATED | QKV_BIAS | {"head.tied", "bias.o", "bias.mlp"},
    "qwen2": GATED | QKV_BIAS | {"head.tied"},
    "qwen2-sliding": GATED | QKV_BIAS | WINDOW | {"head.untied", "window.added"},
    "qwen3": GATED | {"head.untied", "norm.qk-skipped"},
    "mistral": GATED | WINDOW | {"head.tied"},
    "smollm3": GATED | {"head.untied", "rotary.added-in-layer"},
    "gemma2": (GATED - {"norm.offset-added"})
    | WINDOW
    | {"head.untied", "window.added", "attention.scale-guessed", "attention.soft-cap", "logits.soft-cap"}
    | {"activation.gelu-form", "embedding.scale", "norm.offset-dropped", "norm.post-skipped"},
    "granite": GATED
    | QKV_BIAS
    | {"head.tied", "bias.o", "bias.mlp", "attention.scale-guessed"}
    | {"embedding.scale", "residual.scale", "logits.scale"},
    "phi": ALL
    | QKV_BIAS
    | {"head.tied", "bias.o", "bias.mlp", "bias.norm", "bias.head", "norm.offset-added"}
    | {"activation.swapped", "activation.gelu-form", "weights.q-k-swapped"},
    "phi3": GATED | {"head.tied"},
    "mixtral": GATED | EXPERTS | {"head.tied"},
    "gpt_oss": (GATED - {"activation.swapped"})
    | QKV_BIAS
    | WINDOW
    | EXPERTS
    | {"head.tied", "window.added", "attention.sink", "rotary.scaling", "bias.o", "bias.router", "bias.experts"}
    | {"experts.gate-clamp", "experts.up-clamp", "experts.alpha", "experts.up-offset"},
}


@pytest.fixture(scope="module")
def effects(checkpoint: Checkpoint) -> Callable[[str], list[Effect]]:
    return lru_cache(maxsize=None)(lambda name: sensitivity(checkpoint(name)))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_what_applies_is_what_the_architecture_has(name: str, effects: Callable[[str], list[Effect]]) -> None:
    assert {e.mutation for e in effects(name)} == EXPECTED[name]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_each_fault_is_visible_everywhere_and_at_its_weakest_place(
    name: str, effects: Callable[[str], list[Effect]]
) -> None:
    blind = [
        f"{e.mutation}: {e.everywhere:.3g}, at {e.weakest_site} {e.weakest:.3g}" for e in effects(name) if not e.visible
    ]
    assert not blind, f"below {VISIBLE:g}: {blind}; change the draws of {name} in tf_tools/_recipes.py"


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_float32_noise_is_a_tenth_of_the_tolerance(name: str, checkpoint: Checkpoint) -> None:
    assert float32_noise(checkpoint(name)) < TOLERANCE / 10


def test_every_mutation_is_exercised_by_a_recipe() -> None:
    assert set().union(*EXPECTED.values()) == {m.name for m in MUTATIONS}
    assert set(EXPECTED) == set(RECIPES)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_the_comparison_rejects_a_server_with_any_one_fault(name: str, checkpoint: Checkpoint) -> None:
    """From end to end: a broken model serves, and its answers are held against the sound one over the same tokens."""
    sound, served = load_reference(checkpoint(name)), load_reference(checkpoint(name))
    anatomy = Anatomy.of(served)
    prompts = probe_prompts(384)

    def report_ok() -> bool:
        answers = serve_with_transformers(served, prompts, 1)
        return compare_run([logprobs_of(sound, a.token_ids) for a in answers], answers).ok

    assert report_ok()
    accepted = []
    for mutation in MUTATIONS:
        for site in mutation.sites(anatomy)[-1:]:
            with site.broken():
                if report_ok():
                    accepted.append(f"{mutation.name} at {site.where}")
    assert not accepted
    assert report_ok()


def test_a_fault_too_small_to_see_is_called_invisible() -> None:
    assert not Effect("x", 2, everywhere=1.0, weakest=VISIBLE / 2, weakest_site="a").visible
    assert not Effect("x", 2, everywhere=VISIBLE / 2, weakest=1.0, weakest_site="a").visible
    assert Effect("x", 2, everywhere=VISIBLE, weakest=VISIBLE, weakest_site="a").visible


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert main(["llama"]) == 0
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "llama: float32 noise" in printed
    assert "rotary.dropped" in printed
