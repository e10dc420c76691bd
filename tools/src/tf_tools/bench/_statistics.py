"""The median of paired ratios with its 95 % bootstrap interval.

In: one ratio per pair. Out: `Interval`. The median, since one pair beside another job of the machine can be far off;
the bootstrap, since ratios of times are skewed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tf_tools.bench._errors import BenchError

CONFIDENCE = 0.95
FEWEST_PAIRS = 6
"""Below, not even the smallest and the largest ratio enclose the median with 95 %: 1 - 2 ** (1 - n)."""
_RESAMPLES = 9999
_SEED = 20240


@dataclass(frozen=True, slots=True)
class Interval:
    """A median of `pairs` ratios, and between which values it lies; `low` and `high` are None for too few pairs."""

    median: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def half_width(self) -> float | None:
        """Of the interval, as a share of the median."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2 / self.median

    def holds(self, ratio: float) -> bool:
        """Whether the interval is known and the ratio lies in it."""
        return self.low is not None and self.high is not None and self.low <= ratio <= self.high


def median_interval(ratios: Sequence[float]) -> Interval:
    """The same ratios give the same interval, in any order.

    Percentiles of the resampled medians (Efron 1979): BCa's correction needs a jackknife, which fails for medians.

    Raises:
        BenchError: no ratio, or one that is not positive and finite.
    """
    wrong = [ratio for ratio in ratios if not (math.isfinite(ratio) and ratio > 0)]
    if wrong or not ratios:
        raise BenchError(f"expected positive ratios, one for each pair; found {wrong or 'none'}")
    return _interval(tuple(sorted(ratios)))


@functools.lru_cache(maxsize=1024)
def _interval(ratios: tuple[float, ...]) -> Interval:
    import numpy as np
    from scipy.stats import bootstrap  # type: ignore[import-untyped]

    data = np.asarray(ratios, dtype=np.float64)
    median = float(np.median(data))
    if len(data) < FEWEST_PAIRS:
        return Interval(median, None, None, len(data))
    result = bootstrap(
        (data,),
        np.median,
        n_resamples=_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    )
    low, high = (float(value) for value in result.confidence_interval)
    return Interval(median, low, high, len(data))
