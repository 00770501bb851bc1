"""Percentiles and bootstrap intervals: pure functions on sequences of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95  # of the intervals
_SEED = 0  # the same records give the same report


class Interval(NamedTuple):
    """A figure with its bootstrap interval; the bounds equal it where there is one sample."""

    value: float
    low: float
    high: float


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100), interpolated; NaN without values."""
    return float(np.percentile(np.asarray(values, dtype=float), q)) if len(values) else float("nan")


def _resampled(count: int) -> np.ndarray:
    """[RESAMPLES, count] indices drawn with replacement."""
    return np.random.default_rng(_SEED).integers(0, count, (RESAMPLES, count))


def _interval(value: float, samples: np.ndarray) -> Interval:
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(samples, [tail, 100 - tail])
    return Interval(value, float(low), float(high))


def median(values: Sequence[float]) -> Interval:
    """The median, its interval by resampling the values; NaN without values."""
    data = np.asarray(values, dtype=float)
    if not len(data):
        return Interval(*[float("nan")] * 3)
    return _interval(float(np.median(data)), np.median(data[_resampled(len(data))], axis=1))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """sum / sum over units that belong together, its interval by resampling the units."""
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    if not bottom.sum():
        return Interval(*[float("nan")] * 3)
    picks = _resampled(len(top))
    # A resample may hold only units without a denominator; it says nothing.
    sums = bottom[picks].sum(axis=1)
    samples = top[picks].sum(axis=1)[sums > 0] / sums[sums > 0]
    return _interval(float(top.sum() / bottom.sum()), samples)


def position_rates(histogram: Sequence[int]) -> list[float]:
    """Unconditional acceptance per block position, from passes by number of accepted drafts.

    rates[i] = share of the passes that accepted draft i+1 (and hence all before it).
    """
    passes = sum(histogram)
    if not passes:
        return []
    at_least = np.cumsum(np.asarray(histogram)[::-1])[::-1]
    return [float(count) / passes for count in at_least[1:]]


def conditional_rates(rates: Sequence[float]) -> list[float | None]:
    """Acceptance of a position given that the one before was accepted; None if it never was."""
    before = [1.0, *rates[:-1]]
    return [rate / last if last else None for rate, last in zip(rates, before, strict=True)]


def add_histograms(histograms: Sequence[Sequence[int]]) -> list[int]:
    """Element by element; shorter ones end in zeros."""
    width = max((len(h) for h in histograms), default=0)
    total = np.zeros(width, dtype=int)
    for histogram in histograms:
        total[: len(histogram)] += np.asarray(histogram, dtype=int)
    return [int(count) for count in total]
