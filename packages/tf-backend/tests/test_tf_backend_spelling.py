"""Guesses at what was meant: a slip of the keyboard is found, and nothing that is far-fetched is offered."""

from __future__ import annotations

import pytest
from tf_backend.model.config import _known_architectures, _known_types
from tf_backend.spelling import meant_by


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("lama", "llama"),
        ("mistal", "mistral"),
        ("mitsral", "mistral"),
        ("qwen3-moe", "qwen3_moe"),
        ("Gemma2", "gemma2"),
        ("no_such_type", ""),
        ("nope", ""),
        ("gpt", ""),
        ("x", ""),
        ("", ""),
        ("qwen9", ""),
        ("phi4", ""),
    ],
)
def test_model_types(word: str, meant: str) -> None:
    assert meant_by(word, _known_types()) == meant


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("LamaForCausalLM", "LlamaForCausalLM"),
        ("LLaMAForCausalLM", "LlamaForCausalLM"),
        ("LlamaForCasualLM", "LlamaForCausalLM"),
        ("NoSuchForCausalLM", ""),
        ("ToyForCausalLM", ""),
        ("Qwen9ForCausalLM", ""),
        ("LlamaConfing", ""),
    ],
)
def test_architectures(word: str, meant: str) -> None:
    """Most names end alike, so that any two share most of their letters."""
    assert meant_by(word, _known_architectures()) == meant


@pytest.mark.parametrize("slip", ["mxtral", "mixxtral", "mixteal", "imxtral"])
def test_each_kind_of_slip(slip: str) -> None:
    assert meant_by(slip, ["mixtral"]) == "mixtral"


def test_the_nearest_is_offered_and_two_slips_only_in_long_names() -> None:
    assert meant_by("gema", ["gemmas", "gemma"]) == "gemma"
    assert meant_by("mxtrl", ["mixtral"]) == ""
    assert meant_by("granitemoehybird", ["granitemoehybrid", "granitemoe"]) == "granitemoehybrid"
    assert meant_by("granitmoehybrd", ["granitemoehybrid"]) == "granitemoehybrid"
