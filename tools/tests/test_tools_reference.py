from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tf_tools import reference
from tf_tools.checkpoints import make_checkpoint
from tf_tools.reference import (
    ReferenceError,
    checkpoint_digest,
    greedy,
    load_reference,
    logprobs_of,
    reference_for,
    reference_logprobs,
    serve_with_transformers,
)

Checkpoint = Callable[[str], Path]
PROMPT = (7, 300, 12, 44, 9)


def test_rows_are_distributions_over_the_vocabulary(checkpoint: Checkpoint) -> None:
    (rows,) = reference_logprobs(checkpoint("llama"), [PROMPT])
    assert rows.shape == (5, 384)
    assert rows.dtype == torch.float32
    assert torch.allclose(rows.exp().sum(-1), torch.ones(5), atol=1e-5)


def test_a_row_depends_on_no_later_token(checkpoint: Checkpoint) -> None:
    one, other = reference_logprobs(checkpoint("gemma2"), [PROMPT, (*PROMPT[:-1], 10)])
    assert torch.allclose(one[:-1], other[:-1], atol=1e-5)
    assert not torch.allclose(one[-1], other[-1], atol=1e-2)


def test_soft_caps_are_there(checkpoint: Checkpoint) -> None:
    """transformers' sdpa attention drops the cap on the scores; the reference must not use it."""
    eager = load_reference(checkpoint("gemma2"))
    expected = logprobs_of(eager, PROMPT)
    eager.set_attn_implementation("sdpa")
    assert float((logprobs_of(eager, PROMPT) - expected).abs().max()) > 0.02


def test_the_cache_is_used_and_keyed_by_content(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("llama")
    first = reference_logprobs(folder, [PROMPT], cache=tmp_path)

    def fail(_: Path) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(reference, "load_reference", fail)
    again = reference_logprobs(folder, [PROMPT], cache=tmp_path)
    assert torch.equal(first[0], again[0])
    with pytest.raises(AssertionError, match="computed again"):
        reference_logprobs(folder, [PROMPT[:3]], cache=tmp_path)


def test_the_digest_follows_the_bytes(tmp_path: Path) -> None:
    one = make_checkpoint("llama", tmp_path / "one")
    same = make_checkpoint("llama", tmp_path / "same")
    other = make_checkpoint("llama", tmp_path / "other", seed=1)
    assert checkpoint_digest(one) == checkpoint_digest(same) != checkpoint_digest(other)
    config = one / "config.json"
    config.write_text(config.read_text().replace("500.0", "501.0"))
    assert checkpoint_digest(one) != checkpoint_digest(same)


def test_greedy_takes_the_best_and_says_by_how_much(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    found = greedy(folder, PROMPT, 3)
    (rows,) = reference_logprobs(folder, [(*PROMPT, *found.tokens)])
    for step, (token, margin) in enumerate(zip(found.tokens, found.margins, strict=True)):
        best = rows[len(PROMPT) - 1 + step].topk(2)
        assert token == int(best.indices[0])
        assert margin == pytest.approx(float(best.values[0] - best.values[1]), abs=1e-4)


def test_a_transformers_server_answers_with_the_reference(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3")
    (answer,) = serve_with_transformers(load_reference(folder), [PROMPT], 3)
    assert answer.tokens == greedy(folder, PROMPT, 3).tokens
    (expected,) = reference_for(folder, [answer])
    assert torch.allclose(answer.logprobs, expected[:-1], atol=1e-5)


def test_no_generated_token_leaves_the_prompt_alone(checkpoint: Checkpoint) -> None:
    (answer,) = serve_with_transformers(load_reference(checkpoint("llama")), [PROMPT], 0)
    assert answer.tokens == ()
    assert answer.logprobs.shape == (4, 384)


def test_float64_is_float64_throughout(checkpoint: Checkpoint) -> None:
    """Norms, softmax and rotary cast to float32 by name; were they left alone, the noise could not be measured."""
    folder = checkpoint("llama")
    double = logprobs_of(load_reference(folder, dtype=torch.float64), PROMPT)
    single = logprobs_of(load_reference(folder), PROMPT)
    assert double.dtype == torch.float64
    assert 1e-9 < float((double - single).abs().max()) < 2e-4
    assert float((double.exp().sum(-1) - 1).abs().max()) < 1e-12
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("tokens", [(), (384,), (-1, 5)])
def test_token_ids_out_of_range_are_refused(checkpoint: Checkpoint, tokens: tuple[int, ...]) -> None:
    with pytest.raises(ReferenceError, match=r"\[0, 384\)"):
        logprobs_of(load_reference(checkpoint("llama")), tokens)
