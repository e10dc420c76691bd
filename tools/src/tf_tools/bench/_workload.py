"""One workload on one engine: all requests at once, stepped until done, with the prefill and the decode timed apart.

In: an engine that takes token ids and steps. Out: `Measure`. Knows nothing of vLLM.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tf_tools.bench._errors import BenchError
from tf_tools.bench._rows import Measure


class Engine(Protocol):
    """What is timed."""

    def submit(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Sequence[str]:
        """Hand over all requests, to generate this many tokens each, greedily; their names."""
        ...

    def step(self) -> Mapping[str, int]:
        """One step; how many new tokens each request got. Requests without any may be missing."""
        ...

    def is_idle(self) -> bool:
        """Whether all requests are done."""
        ...


@dataclass(frozen=True, slots=True)
class _Run:
    prefill_wall: float
    prefill_cpu: float
    decode_wall: float
    decode_cpu: float
    decode_tokens: int


def prompts_for(concurrency: int, length: int, vocabulary: int) -> tuple[tuple[int, ...], ...]:
    """Token ids drawn from the whole vocabulary; the same for the same arguments, in every process."""
    draw = random.Random(f"{concurrency} {length} {vocabulary}")
    return tuple(tuple(draw.randrange(vocabulary) for _ in range(length)) for _ in range(concurrency))


def measure(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    repeats: int,
    turn: Callable[[], None] = lambda: None,
) -> Measure:
    """Run once to warm up, then `repeats` times on the clock. No repeats: a warm-up alone.

    Args:
        turn: returns when a run on the clock may begin.

    Raises:
        BenchError: the engine generated another number of tokens than asked for, or other steps in another repeat.
    """
    warm = _run(engine, prompts, output_tokens)
    runs = []
    for _ in range(repeats):
        turn()
        runs.append(_run(engine, prompts, output_tokens))
    found = {run.decode_tokens for run in (warm, *runs)}
    if len(found) != 1:
        raise BenchError(f"the same requests were scheduled differently: {sorted(found)} tokens after the prefill")
    return Measure(
        concurrency=len(prompts),
        input_tokens=sum(map(len, prompts)),
        output_tokens=output_tokens * len(prompts),
        decode_tokens=warm.decode_tokens,
        prefill_wall=tuple(run.prefill_wall for run in runs),
        prefill_cpu=tuple(run.prefill_cpu for run in runs),
        decode_wall=tuple(run.decode_wall for run in runs),
        decode_cpu=tuple(run.decode_cpu for run in runs),
    )


def _run(engine: Engine, prompts: Sequence[Sequence[int]], output_tokens: int) -> _Run:
    gc.collect()  # garbage of what came before belongs to no run
    wall, cpu = time.perf_counter(), time.process_time()
    waiting = set(engine.submit(prompts, output_tokens))
    names = frozenset(waiting)
    generated = dict.fromkeys(names, 0)
    first_wall, first_cpu, first_total = 0.0, 0.0, 0
    while not engine.is_idle():
        for name, tokens in engine.step().items():
            generated[name] += tokens
            if tokens:
                waiting.discard(name)
        if not waiting and not first_wall:
            first_wall, first_cpu = time.perf_counter(), time.process_time()
            first_total = sum(generated.values())
    last_wall, last_cpu = time.perf_counter(), time.process_time()
    wrong = sorted({count for count in generated.values() if count != output_tokens})
    if wrong:
        raise BenchError(f"expected {output_tokens} tokens for each request; the engine generated {wrong}")
    return _Run(
        first_wall - wall,
        first_cpu - cpu,
        last_wall - first_wall,
        last_cpu - first_cpu,
        sum(generated.values()) - first_total,
    )
