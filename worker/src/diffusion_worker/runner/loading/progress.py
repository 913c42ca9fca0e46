# SPDX-License-Identifier: Apache-2.0
"""Progress of a load, reported often enough to show that it moves and seldom enough to cost nothing."""

from collections.abc import Callable

ReportProgress = Callable[[int, int], None]

# A report follows once at least this part of the bytes was added.
PART = 0.01


class LoadingProgress:
    """A count of the bytes loaded so far. `report` is called with the count and `total` as it grows."""

    def __init__(self, total: int, report: ReportProgress) -> None:
        self._total = total
        self._report = report
        self._done = 0
        self._told = 0

    def add(self, count: int) -> None:
        """Count `count` bytes more as loaded, up to the total.

        A report follows if the last one is at least the part `PART` of the total behind.
        """
        # Tied weights count once for each name in the total, and parts of a tensor less than it.
        self._done = min(self._total, self._done + count)
        if self._done - self._told >= self._total * PART:
            self._tell()

    def finish(self) -> None:
        """Set the count to the total and report it, even if the added bytes fall short, as those of a rank's parts do."""
        self._done = self._total
        self._tell()

    def _tell(self) -> None:
        self._told = self._done
        self._report(self._done, self._total)
