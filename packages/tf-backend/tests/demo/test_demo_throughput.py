"""Rates are split at the first token of the last request."""

from __future__ import annotations

import pytest
from tf_backend.demo import Throughput
from tf_backend.demo._throughput import Stopwatch


class _Clock:
    def __init__(self, *times: float) -> None:
        self._times = list(times)

    def __call__(self) -> float:
        return self._times.pop(0)


def test_prompt_phase_ends_when_every_request_has_a_token() -> None:
    watch = Stopwatch(_Clock(10.0, 14.0, 16.0))
    watch.start({"a": 6, "b": 2})
    watch.step({"a": 1})
    watch.step({"a": 1, "b": 1})
    watch.step({"a": 3})
    watch.step({"a": 1, "b": 2})
    result = watch.result()
    assert result == Throughput(prompt_tokens=8, prompt_seconds=4.0, generated_tokens=6, generation_seconds=2.0)
    assert result.prompt_rate == pytest.approx(2.0)
    assert result.generation_rate == pytest.approx(3.0)


def test_one_token_each_generates_nothing_more() -> None:
    watch = Stopwatch(_Clock(0.0, 1.0, 1.0))
    watch.start({"a": 5})
    watch.step({"a": 1})
    assert watch.result().generation_rate == 0.0


def test_an_output_without_tokens_is_no_first_token() -> None:
    watch = Stopwatch(_Clock(0.0, 2.0))
    watch.start({"a": 5})
    watch.step({"a": 0})
    assert watch.result() == Throughput(5, 2.0, 0, 0.0)
