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
        logprobs: [P + n - 1 - start, vocab] float32, natural logarithms; row i is the distribution of token t + 1 given
            tokens 0..t, where t = start + i. Rows with t < P - 1 come from the prompt, the others from decoding.
        start: the first t; 0 unless the server was not asked about the prompt, then P - 1.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: Tensor
    start: int = 0

    def __post_init__(self) -> None:
        rows = len(self.prompt) + len(self.tokens) - 1 - self.start
        if not self.prompt:
            raise ValueError("a sequence needs a prompt of at least one token")
        if not 0 <= self.start < len(self.prompt):
            raise ValueError(f"start must lie in the prompt, in [0, {len(self.prompt)}), found {self.start}")
        if self.logprobs.ndim != 2 or self.logprobs.shape[0] != rows:
            raise ValueError(
                f"expected log-probabilities of shape [{rows}, vocab] for {len(self.prompt)} prompt and "
                f"{len(self.tokens)} generated tokens from position {self.start} on, found {list(self.logprobs.shape)}"
            )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and continuation, P + n ids."""
        return self.prompt + self.tokens
