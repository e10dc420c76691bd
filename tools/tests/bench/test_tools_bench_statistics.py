"""The interval finds a known ratio in synthetic noise, sees a real difference, and claims nothing from too little."""

from __future__ import annotations

import random

import pytest
from tf_tools.bench import BenchError, median_interval


def _ratios(true: float, noise: float, pairs: int, seed: int) -> list[float]:
    """Two processes per pair, each with its own noise; the pair's machine state cancels in the ratio."""
    draw = random.Random(seed)
    found = []
    for _ in range(pairs):
        machine = draw.uniform(1.0, 2.0)
        ours, other = (machine * draw.gauss(1.0, noise) for _ in range(2))
        found.append(true * other / ours)
    return found


@pytest.mark.parametrize("true", [1.0, 0.86])
def test_the_interval_covers_the_true_ratio(true: float) -> None:
    """Nominally 95 % of 100 experiments of nine pairs; fewer than 88 would be a fault and not luck (p < 0.003)."""
    covered = sum(median_interval(_ratios(true, 0.02, 9, seed)).holds(true) for seed in range(100))
    assert covered >= 88


def test_identical_arms_are_near_one() -> None:
    found = median_interval(_ratios(1.0, 0.01, 9, seed=5))
    assert found.median == pytest.approx(1.0, abs=0.02)
    assert found.holds(1.0)
    assert found.half_width is not None
    assert found.half_width < 0.03


def test_five_percent_are_seen_at_one_percent_of_noise() -> None:
    """The whole interval lies below 1 in at least 95 of 100 experiments of nine pairs."""
    highs = [median_interval(_ratios(0.95, 0.01, 9, seed)).high for seed in range(100)]
    assert sum(high is not None and high < 1.0 for high in highs) >= 95


def test_one_wild_pair_moves_little() -> None:
    calm = [0.99, 1.0, 1.01, 1.0, 0.995, 1.005, 1.0, 1.002]
    wild = median_interval([*calm, 3.0])
    assert wild.median == pytest.approx(1.0, abs=0.002)
    assert wild.high is not None
    assert wild.high < 1.02


def test_the_order_of_pairs_does_not_matter() -> None:
    ratios = _ratios(1.0, 0.02, 9, seed=1)
    assert median_interval(ratios) == median_interval(ratios[::-1]) == median_interval(ratios)


def test_equal_ratios_have_no_width() -> None:
    found = median_interval([0.5] * 9)
    assert (found.low, found.high, found.half_width) == (0.5, 0.5, 0.0)


@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_too_few_pairs_have_a_median_and_no_interval(pairs: int) -> None:
    found = median_interval([0.9] * pairs)
    assert (found.median, found.low, found.high, found.half_width, found.pairs) == (0.9, None, None, None, pairs)
    assert not found.holds(0.9)


def test_six_pairs_have_an_interval() -> None:
    assert median_interval([0.9, 1.0, 1.1, 1.0, 0.95, 1.05]).holds(1.0)


@pytest.mark.parametrize("ratios", [[], [1.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf")]])
def test_what_is_no_ratio_is_refused(ratios: list[float]) -> None:
    with pytest.raises(BenchError, match="positive ratios"):
        median_interval(ratios)
