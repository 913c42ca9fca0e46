# SPDX-License-Identifier: Apache-2.0
"""Seconds that pass while a second of expected work is done, learned from requests that end. Pure.

Costs of steps say nothing of decoding, of the time between ticks, nor of batches that are smaller than they could be. All of that
is in the ratio of the time that passed to the work that was expected.
"""

# Requests of one batch end together: their work counts for the same time.
TOGETHER_S = 0.05
# The weight of all samples before, at each new one.
KEPT = 0.97
LEAST, MOST = 0.8, 50.0


class Pace:
    """The ratio of the newest samples."""

    def __init__(self) -> None:
        self._passed_s = self._work_s = 1e-3
        self._since_s: float | None = None

    @property
    def ratio(self) -> float:
        """Seconds for each second of expected work; 1 before the first sample."""
        return min(MOST, max(LEAST, self._passed_s / self._work_s))

    def begin(self, now_s: float) -> None:
        """Note that work begins where there was none."""
        self._since_s = now_s

    def done(self, work_s: float, now_s: float) -> None:
        """Note that a request ended, which was expected to be so much work."""
        if self._since_s is None:
            return
        passed_s = now_s - self._since_s
        if passed_s > TOGETHER_S:
            self._passed_s, self._work_s = self._passed_s * KEPT, self._work_s * KEPT
        self._passed_s += passed_s
        self._work_s += work_s
        self._since_s = now_s
