"""What a server answered, in the one form in which the oracle compares it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Sequence"]


@dataclass(frozen=True, slots=True)
class Sequence:
    """One prompt with its continuation and the distribution at every position.

    Attributes:
        prompt: P token ids, P >= 1.
        tokens: n generated token ids.
        logprobs: [P + n - 1, vocab] float32, natural logarithms; row t is the distribution of token t + 1 given tokens
            0..t. The first P - 1 rows come from the prompt, the others from decoding.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: Tensor

    def __post_init__(self) -> None:
        rows = len(self.prompt) + len(self.tokens) - 1
        if not self.prompt:
            raise ValueError("a sequence needs a prompt of at least one token")
        if self.logprobs.ndim != 2 or self.logprobs.shape[0] != rows:
            raise ValueError(
                f"expected log-probabilities of shape [{rows}, vocab] for {len(self.prompt)} prompt and "
                f"{len(self.tokens)} generated tokens, found {list(self.logprobs.shape)}"
            )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and continuation, P + n ids."""
        return self.prompt + self.tokens
