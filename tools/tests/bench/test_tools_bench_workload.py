"""A workload is timed in its two phases, on an engine that only counts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest
from tf_tools.bench import BenchError, Measure
from tf_tools.bench._workload import measure, prompts_for


@pytest.fixture(autouse=True)
def _no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection takes a second in a test session that has imported torch."""
    monkeypatch.setattr("tf_tools.bench._workload.gc.collect", lambda: 0)


class CountingEngine:
    """Gives each request one token a step after a first step for each `chunk` of requests."""

    def __init__(self, chunk: int = 100, short: int = 0) -> None:
        self.chunk, self.short = chunk, short
        self.left: dict[str, int] = {}
        self.waiting: list[str] = []
        self.seen: list[Sequence[Sequence[int]]] = []

    def submit(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Sequence[str]:
        self.seen.append(prompts)
        names = [str(index) for index in range(len(prompts))]
        self.left = dict.fromkeys(names, output_tokens - self.short)
        self.waiting = list(names)
        return names

    def step(self) -> Mapping[str, int]:
        self.waiting = self.waiting[self.chunk :]
        running = [name for name in self.left if name not in self.waiting]
        for name in running:
            self.left[name] -= 1
        self.left = {name: count for name, count in self.left.items() if count > 0}
        return dict.fromkeys(running, 1)

    def is_idle(self) -> bool:
        return not self.left


def test_one_warm_up_and_the_repeats_see_the_same_prompts() -> None:
    engine = CountingEngine()
    prompts = prompts_for(4, 16, 100)
    found = measure(engine, prompts, 8, repeats=3)
    assert engine.seen == [prompts] * 4
    assert (found.concurrency, found.input_tokens, found.output_tokens, found.decode_tokens) == (4, 64, 32, 28)
    for times in (found.prefill_wall, found.prefill_cpu, found.decode_wall, found.decode_cpu):
        assert len(times) == 3
        assert min(times) >= 0


def test_the_prefill_lasts_until_the_last_request_has_a_token() -> None:
    """One request a step: by then the first of three has three tokens, the second two."""
    assert measure(CountingEngine(chunk=1), prompts_for(3, 4, 10), 8, repeats=1).decode_tokens == 24 - 6


def test_one_output_token_leaves_no_decode() -> None:
    found = measure(CountingEngine(), prompts_for(2, 4, 10), 1, repeats=1)
    assert found.decode_tokens == 0
    assert found.seconds("decode", "cpu") is None
    assert found.seconds("all", "wall") is not None


def test_a_priming_measure_has_no_times() -> None:
    found = measure(CountingEngine(), prompts_for(2, 4, 10), 4, repeats=0)
    assert found.prefill_cpu == ()
    assert found.seconds("all", "cpu") is None


def test_missing_tokens_are_refused() -> None:
    with pytest.raises(BenchError, match=r"expected 8 tokens.*\[7\]"):
        measure(CountingEngine(short=1), prompts_for(2, 4, 10), 8, repeats=1)


def test_another_schedule_in_a_repeat_is_refused() -> None:
    engine = CountingEngine(chunk=1)
    submit = engine.submit

    def changing(prompts: Sequence[Sequence[int]], output_tokens: int) -> Sequence[str]:
        engine.chunk += 1
        return submit(prompts, output_tokens)

    engine.submit = changing  # type: ignore[method-assign]
    with pytest.raises(BenchError, match="scheduled differently"):
        measure(engine, prompts_for(4, 4, 10), 8, repeats=1)


def test_prompts_are_the_same_in_every_process() -> None:
    assert prompts_for(1, 4, 49152) == prompts_for(1, 4, 49152)
    assert prompts_for(2, 64, 10) != prompts_for(2, 64, 11)
    assert {len(prompt) for prompt in prompts_for(3, 5, 7)} == {5}
    assert max(max(prompt) for prompt in prompts_for(8, 64, 7)) == 6


def test_seconds_are_medians_and_whole_runs_are_added_before() -> None:
    found = Measure(1, 64, 32, 31, (1.0, 2.0, 9.0), (1.0,) * 3, (9.0, 2.0, 1.0), (4.0, 5.0, 6.0))
    assert found.seconds("all", "wall") == 10.0
    assert found.seconds("prefill", "wall") == 2.0
    assert found.seconds("decode", "cpu") == 5.0
    assert [found.tokens(phase) for phase in ("all", "prefill", "decode")] == [32, 64, 31]


def test_the_measuring_package_imports_nothing_heavy() -> None:
    """The measured process imports it first: what it imports would be missing from the times of the import."""
    code = "import sys, tf_tools.bench._worker; print(sorted({'torch', 'vllm', 'scipy', 'numpy', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
