# SPDX-License-Identifier: Apache-2.0
"""Memory of a step by its pixels, learned from the peaks that the ranks report. Pure.

The estimate errs on the small side, so that nothing is refused that would have fitted. It refuses images larger than one that failed
recently while no other was with the ranks, or than a line through the measured peaks allows.
"""

import math

import msgspec

from diffusion_worker.engine.scheduling.request_class import RequestClass
from diffusion_worker.recent import Recent

# The decoded image alone is three channels of float32, and with guidance its load counts twice.
LEAST_BYTES_PER_PIXEL = 6
# A failed load may fit later, when others have freed memory.
FORGET_S = 600.0
# Sizes whose peaks are remembered; more would only slow it down.
REMEMBERED = 256


class PeakModel(msgspec.Struct):
    """Peaks of memory by the amount of something, and a straight line through those at the smallest and the largest amount."""

    peaks: dict[float, int] = {}

    def add(self, amount: float, peak_bytes: int) -> None:
        """Record a peak of memory at an amount; the highest of several at one amount counts."""
        self.peaks[amount] = max(peak_bytes, self.peaks.get(amount, 0))
        if len(self.peaks) > REMEMBERED:
            inner = sorted(self.peaks)[1:-1]
            del self.peaks[inner[len(inner) // 2]]

    def most(self, free_bytes: int, beside_bytes: int = 0) -> float:
        """Return the amount that fits in `free_bytes` beside `beside_bytes`, which others hold meanwhile.

        It is infinite if `free_bytes` is 0, fewer than two amounts were measured, or peaks do not grow. Without `beside_bytes` it is
        never less than the largest measured one.
        """
        if not free_bytes or len(self.peaks) < 2:
            return math.inf
        low, high = min(self.peaks), max(self.peaks)
        slope = (self.peaks[high] - self.peaks[low]) / (high - low)
        return max(high, high + (free_bytes - self.peaks[high]) / slope) - beside_bytes / slope if slope > 0 else math.inf


class MemoryModel:
    """Memory of one rank's device beside the weights: `free_bytes` in all. With 0, which is unknown, nothing is refused."""

    def __init__(self, free_bytes: int = 0) -> None:
        self.free_bytes = free_bytes
        # Peaks of single requests by load, decoding included; and of each class by its number of requests in a step.
        self._alone = PeakModel()
        self._batches: Recent[RequestClass, PeakModel] = Recent(REMEMBERED)
        self._failed_load = math.inf
        self._failed_at_s = 0.0

    def observe(self, kind: RequestClass, requests: int, peak_bytes: int) -> None:
        """Record the peak of memory of a step with so many requests of a class, without others' bytes beside them; 0 is no report."""
        if peak_bytes <= 0:
            return
        if requests == 1:
            self._alone.add(kind.load, peak_bytes)
        line = self._batches.get(kind) or PeakModel()
        line.add(requests, peak_bytes)
        self._batches[kind] = line

    def failed(self, load: float, now_s: float) -> None:
        """Lower `most_load` below this load, because such a request had no room although it was alone.

        A success with as large a load lifts the limit, and so do FORGET_S seconds.
        """
        self._failed_load = min(load, self._failed_load)
        self._failed_at_s = now_s

    def succeeded(self, load: float) -> None:
        """Record that a request of this load was made: a failure of this or a smaller load counts no more."""
        if load >= self._failed_load:
            self._failed_load = math.inf

    def most_load(self, now_s: float) -> float:
        """Return the largest load of one request that may fit in memory, as far as is known; infinite if nothing is known."""
        most = min(self._alone.most(self.free_bytes), self.free_bytes / LEAST_BYTES_PER_PIXEL if self.free_bytes else math.inf)
        if now_s - self._failed_at_s >= FORGET_S:
            self._failed_load = math.inf
        return min(most, math.nextafter(self._failed_load, 0)) if math.isfinite(self._failed_load) else most

    def batch(self, kind: RequestClass, demand: int, *, beside_bytes: int = 0) -> int:
        """Return how many of `demand` requests of a class fit in a step: all while too little is known, and always at least one.

        `beside_bytes` are held by requests of other classes, which wait on the ranks.
        """
        line = self._batches.get(kind)
        most = line.most(self.free_bytes, beside_bytes) if line else math.inf
        return demand if math.isinf(most) else max(1, min(demand, int(most)))
