# SPDX-License-Identifier: Apache-2.0
"""Seconds that pass while a second of expected work is done, learned from requests that end. Pure.

Costs of steps leave out decoding, the time between ticks, and batches that are smaller than they could be. The ratio of the time that
passed to the work that was expected includes all of that.
"""

# Requests of one batch end together: their work counts for the same time.
TOGETHER_S = 0.05
# Factor on the weight of all earlier samples at each new one.
KEPT = 0.97
LEAST, MOST = 0.8, 50.0


class Pace:
    """The ratio of time passed to work expected, over the newest samples."""

    def __init__(self) -> None:
        self._passed_s = self._work_s = 1e-3
        self._since_s: float | None = None

    @property
    def ratio(self) -> float:
        """Seconds for each second of expected work, from `LEAST` to `MOST`; 1 before the first sample."""
        return min(MOST, max(LEAST, self._passed_s / self._work_s))

    def begin(self, now_s: float) -> None:
        """Measure the time for the next request that ends from now on; the time before counts for none."""
        self._since_s = now_s

    def done(self, work_s: float, now_s: float) -> None:
        """Learn from a request that ended: its expected work, and the time since the last end or `begin`. No effect before a `begin`."""
        if self._since_s is None:
            return
        passed_s = now_s - self._since_s
        if passed_s > TOGETHER_S:
            self._passed_s, self._work_s = self._passed_s * KEPT, self._work_s * KEPT
        self._passed_s += passed_s
        self._work_s += work_s
        self._since_s = now_s
