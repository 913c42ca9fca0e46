# SPDX-License-Identifier: Apache-2.0
"""How much memory a step needs by the pixels it works on, learned from the peaks that the ranks report. Pure.

The estimate errs on the small side, so that nothing is refused that would have fitted: what is refused is larger than a
picture that failed alone a short time ago, or than a straight line through the measured peaks allows.
"""

import math

from diffusion_worker.engine.request_class import RequestClass

# The decoded picture alone is three channels of float32, and with guidance its load counts twice.
LEAST_BYTES_PER_PIXEL = 6
# What failed once may fit later: memory that others held is free again.
FORGET_S = 600.0
# So many points keep the line; more would only slow it down.
POINTS = 64


class MemoryModel:
    """Memory of one rank's device beside the weights, `free_bytes` of it in all (0: not known, then nothing is refused)."""

    def __init__(self, free_bytes: int = 0) -> None:
        self.free_bytes = free_bytes
        self._peaks: dict[float, int] = {}
        self._failed_load = math.inf
        self._failed_at_s = 0.0

    def observe(self, load: float, peak_bytes: int) -> None:
        """A step on `load` pixels, all its requests together, held this much at most."""
        if peak_bytes <= 0:
            return
        self._peaks[load] = max(peak_bytes, self._peaks.get(load, 0))
        if len(self._peaks) > POINTS:
            # The ends carry the line.
            inner = sorted(self._peaks)[1:-1]
            del self._peaks[inner[len(inner) // 2]]

    def failed(self, load: float, now_s: float) -> None:
        """One request alone, of this load, was out of memory."""
        self._failed_load = min(load, self._failed_load)
        self._failed_at_s = now_s

    def most_load(self, now_s: float) -> float:
        """The load over which a step cannot fit, as far as is known."""
        most = min(self._most_by_peaks(), self.free_bytes / LEAST_BYTES_PER_PIXEL if self.free_bytes else math.inf)
        if now_s - self._failed_at_s >= FORGET_S:
            self._failed_load = math.inf
        return min(most, math.nextafter(self._failed_load, 0)) if math.isfinite(self._failed_load) else most

    def batch(self, kind: RequestClass, demand: int, now_s: float) -> int:
        """How many requests of a class fit in one step; at least one: whether that fits was decided at its admission."""
        most = self.most_load(now_s)
        return demand if math.isinf(most) else max(1, min(demand, int(most / kind.load)))

    def _most_by_peaks(self) -> float:
        """Where the line through the smallest and the largest measured load meets the device's memory."""
        if not self.free_bytes or len(self._peaks) < 2:
            return math.inf
        low, high = min(self._peaks), max(self._peaks)
        slope = (self._peaks[high] - self._peaks[low]) / (high - low)
        if slope <= 0:
            return math.inf
        return max(high, high + (self.free_bytes - self._peaks[high]) / slope)
