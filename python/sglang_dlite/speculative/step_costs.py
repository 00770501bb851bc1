"""What a verify step costs at each batch size and width: measured where it was, else fitted.

No torch and no clock: seconds are handed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

# Shape of a step's cost before anything is measured, over `features`; only ratios matter.
_PRIOR = np.array([1.0, 0.04, 0.05, 0.25])
_PRIOR_WEIGHT = 0.02  # of each prior coefficient, in measurements
_MEMORY = 32  # samples over which a cell averages
_FRESH = 64  # steps after which a cell no longer tells how fast the machine is now
_STALE_COUNT = 4  # what a cell that is not fresh counts for when it is measured again
_LEVEL_RATE = 0.1
_OUTLIER = 4.0  # a sample counts for at most this many times the expected seconds
_REFIT_EVERY = 8  # samples
_FIT_COUNT = 2  # samples that the fit is worth beside a cell's own


def bucket(batch_size: int) -> int:
    """The batch sizes that share a cell: up to 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ... requests."""
    power = 1 << max(batch_size - 1, 0).bit_length()
    smaller = power * 3 // 4
    return smaller if power >= 4 and batch_size <= smaller else power


def features(batch_size: float, width: int) -> np.ndarray:
    """[1, n, n * d, whether drafts are made]: fixed cost, per request, per row, the drafter."""
    return np.array([1.0, batch_size, batch_size * width, float(width > 1)])


@dataclass
class _Cell:
    """Steps of one batch-size bucket and width; seconds are relative to the book's level."""

    batch_size: float
    seconds: float
    count: float
    measured_at: int


class CostBook:
    """Running means of step times per (batch-size bucket, width), and estimates for the rest.

    `level` is how slow steps are now compared with when the cells were measured. Growing contexts
    and a busy machine change all widths alike, but only the width in use is measured.
    """

    def __init__(self) -> None:
        self._cells: dict[int, dict[int, _Cell]] = {}  # by width, then by bucket
        self._level = 1.0
        self._steps = 0
        self._coefficients = _PRIOR.copy()
        self._fitted_at = -_REFIT_EVERY

    def add(self, batch_size: int, width: int, seconds: float) -> None:
        """Record one step of `batch_size` requests and `width` rows each."""
        self._steps += 1
        cells = self._cells.setdefault(width, {})
        cell = cells.get(bucket(batch_size))
        if cell is None:
            if self._steps > 1:  # a hiccup would price the width out of ever being measured again
                seconds = min(seconds, _OUTLIER * self.estimate(batch_size, width))
            cells[bucket(batch_size)] = _Cell(batch_size, seconds / self._level, 1.0, self._steps)
            self._fit()
            return
        slope = self._fitted(batch_size, width) - self._fitted(cell.batch_size, width)
        expected = max(cell.seconds + slope, 0.1 * cell.seconds) * self._level
        ratio = min(seconds / expected, _OUTLIER)
        if self._steps - cell.measured_at > _FRESH:
            cell.count = min(cell.count, _STALE_COUNT)
        else:
            self._level *= 1 + _LEVEL_RATE * (ratio - 1)
        cell.count = min(cell.count + 1, _MEMORY)
        cell.seconds += (ratio * expected / self._level - slope - cell.seconds) / cell.count
        cell.batch_size += (batch_size - cell.batch_size) / cell.count
        cell.measured_at = self._steps
        if self._steps - self._fitted_at >= _REFIT_EVERY:
            self._fit()

    def estimate(self, batch_size: int, width: int) -> float:
        """Expected seconds of a step; before the first sample, in an arbitrary unit.

        The nearest measured batch size of this width, moved by the slope of the fit; the fit
        alone where the width was never measured.
        """
        fitted = self._fitted(batch_size, width)
        cells = self._cells.get(width)
        if not cells:
            return fitted * self._level
        near = min(cells.values(), key=lambda cell: abs(math.log(cell.batch_size / batch_size)))
        moved = max(
            near.seconds + fitted - self._fitted(near.batch_size, width), 0.1 * near.seconds
        )
        return (near.count * moved + _FIT_COUNT * fitted) / (near.count + _FIT_COUNT) * self._level

    def age(self, batch_size: int, width: int) -> float:
        """Steps since a batch of about this size was measured at this width; inf for never."""
        cell = self._cells.get(width, {}).get(bucket(batch_size))
        return math.inf if cell is None else self._steps - cell.measured_at

    def _fitted(self, batch_size: float, width: int) -> float:
        x = features(batch_size, width)
        floor = 0.1 * self._coefficients[0]
        return max(float(self._coefficients @ x), float(floor))

    def _fit(self) -> None:
        """Least squares of relative errors over the cells, with a ridge towards the prior."""
        self._fitted_at = self._steps
        cells = [(c, d) for d, row in self._cells.items() for c in row.values()]
        x = np.array([features(c.batch_size, d) for c, d in cells])  # [m, 4]
        seconds = np.array([c.seconds for c, _ in cells])  # [m]
        weights = np.array([min(c.count, 8.0) / 8.0 for c, _ in cells])  # [m]
        scale = np.average(seconds / (x @ _PRIOR), weights=weights)
        rows = x * (scale * _PRIOR) / seconds[:, None]  # unknowns: multiples of the prior
        normal = rows.T @ (weights[:, None] * rows) + _PRIOR_WEIGHT * np.eye(len(_PRIOR))
        solution = np.linalg.solve(normal, rows.T @ weights + _PRIOR_WEIGHT)
        self._coefficients = solution * scale * _PRIOR
