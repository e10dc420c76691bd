"""A real model on real text: SmolLM2-135M in float32, log-probabilities over the whole vocabulary at every position."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tf_backend.demo import prepare_smollm2
from tf_tools.engine import ENVIRONMENT, warm
from tf_tools.fork import run_in_fork
from tf_tools.reference import load_reference, logprobs_of

pytestmark = pytest.mark.engine

TOKENS = 64
TEXTS = (
    "The lighthouse keeper climbed the spiral stairs every evening, carrying a lamp and a small tin of "
    "oil. From the gallery he could see the whole bay: fishing boats coming home, the ferry from the "
    "islands, and the long dark line of the reef that had given the place its name two hundred years "
    "before. He wrote the weather in a book that nobody else would ever open.",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot = items[len(items) // "
    "2]\n    left = [x for x in items if x < pivot]\n    middle = [x for x in items if x == pivot]\n    "
    "right = [x for x in items if x > pivot]\n    return quicksort(left) + middle + quicksort(right)\n\n"
    "print(quicksort([3, 6, 8, 10, 1, 2, 1]))",
    "Water expands when it freezes, which is why ice floats and why pipes burst in winter. Most other "
    "liquids contract. The reason lies in the shape of the molecule: hydrogen bonds hold the molecules of"
    " ice in an open lattice, with more empty space than the liquid has. At four degrees Celsius water is"
    " at its densest, so lakes freeze from the top and fish survive.",
)


def served_logprobs(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Log-probabilities [tokens, vocabulary] of each prompt, from the logits that the served model hands to the engine."""
    os.environ.update(ENVIRONMENT)
    from tf_backend.model.served import TransformersForCausalLM
    from vllm import LLM, SamplingParams

    rows: list[torch.Tensor] = []
    compute = TransformersForCausalLM.compute_logits

    def recorded(self: TransformersForCausalLM, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = compute(self, hidden_states)
        assert logits is not None
        rows.append(logits.detach().float().clone())
        return logits

    llm = LLM(
        model=str(folder), model_impl="transformers", dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=128,
        max_num_seqs=4, enable_prefix_caching=False,
    )  # fmt: skip
    TransformersForCausalLM.compute_logits = recorded  # type: ignore[method-assign]
    found = []
    for prompt in prompts:
        rows.clear()
        llm.generate(
            [{"prompt_token_ids": prompt}],
            SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=1),
            use_tqdm=False,
        )
        # vLLM asks for the logits of all but the last prompt token for the prompt's log-probabilities, and of the last to sample.
        by_size = sorted(rows, key=len, reverse=True)
        assert [len(part) for part in by_size] == [TOKENS - 1, 1]
        found.append(torch.cat(by_size).log_softmax(dim=-1))
    return found


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepare_smollm2())
    return [tokenizer(text)["input_ids"][:TOKENS] for text in TEXTS]


def test_smollm2_equals_transformers_over_the_whole_vocabulary(prompts: list[list[int]]) -> None:
    folder = prepare_smollm2()
    assert [len(prompt) for prompt in prompts] == [TOKENS] * 3
    warm()
    served = run_in_fork(served_logprobs, 600, folder, prompts).value()
    assert isinstance(served, list)
    model = load_reference(folder)
    for prompt, found in zip(prompts, served, strict=True):
        expected = logprobs_of(model, prompt)
        assert found.shape == expected.shape == (TOKENS, model.config.vocab_size)
        difference = (found - expected).abs().max().item()
        assert difference < 2e-3, difference
