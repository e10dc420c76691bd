"""Tokens and seconds of one batch, split at the moment when every request has its first token.

In: the engine's outputs as they come. Out: `Throughput`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Throughput:
    """The prompt phase lasts until every request has its first token; the generation phase is the rest.

    Seconds are wall time. `generated_tokens` counts those of the generation phase alone, so without the first ones.
    """

    prompt_tokens: int
    prompt_seconds: float
    generated_tokens: int
    generation_seconds: float

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second over the whole batch; 0 when nothing was timed."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def generation_rate(self) -> float:
        """Generated tokens per second over the whole batch; 0 when every request ended with its first token."""
        return self.generated_tokens / self.generation_seconds if self.generation_seconds > 0 else 0.0


class Stopwatch:
    """Collects a `Throughput`: `start`, then `tokens` for each output, then `result`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = 0.0
        self._waiting: set[str] = set()
        self._prompt_tokens = 0
        self._prefilled: float | None = None
        self._early = 0
        self._late = 0

    def start(self, prompt_tokens: dict[str, int]) -> None:
        """Begin, with the number of prompt tokens of each request."""
        self._waiting = set(prompt_tokens)
        self._prompt_tokens = sum(prompt_tokens.values())
        self._started = self._clock()

    def step(self, new_tokens: dict[str, int]) -> None:
        """Note the tokens that one step of the engine gave to each request."""
        count = sum(new_tokens.values())
        if self._prefilled is not None:
            self._late += count
            return
        self._early += count
        self._waiting -= {request for request, tokens in new_tokens.items() if tokens}
        if not self._waiting:
            self._prefilled = self._clock()

    def result(self) -> Throughput:
        """The times so far."""
        now = self._clock()
        boundary = now if self._prefilled is None else self._prefilled
        return Throughput(self._prompt_tokens, boundary - self._started, self._late, now - boundary)
