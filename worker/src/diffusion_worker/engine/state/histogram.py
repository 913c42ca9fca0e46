# SPDX-License-Identifier: Apache-2.0
"""Durations of a kind as a histogram, which the engine fills and the metrics page shows."""

from bisect import bisect_left
from collections.abc import Iterator

# Bounds from the step of a toy on a GPU to the load of a large model, each at most 2.5 times the previous.
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class Durations:
    """A histogram of durations in seconds: counts by the fixed upper bounds `BOUNDS_S`, and the sum `total_s`."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    def observe(self, seconds: float) -> None:
        """Count one duration, and add it to the sum; one over the largest bound counts too."""
        self.total_s += seconds
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Yield each bound with the number of durations up to it, equal ones included; the last bound is infinity."""
        below = 0
        for bound, count in zip((*BOUNDS_S, float("inf")), self._counts, strict=True):
            below += count
            yield bound, below
