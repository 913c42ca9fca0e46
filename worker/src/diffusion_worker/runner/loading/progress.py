# SPDX-License-Identifier: Apache-2.0
"""Progress of a load, reported often enough to show that it moves and seldom enough to cost nothing."""

from collections.abc import Callable

ReportProgress = Callable[[int, int], None]

# A report follows once at least this part of the bytes was added.
PART = 0.01


class LoadingProgress:
    """The bytes loaded so far, reported with the bytes in all."""

    def __init__(self, total: int, report: ReportProgress) -> None:
        self._total = total
        self._report = report
        self._done = 0
        self._told = 0

    def add(self, count: int) -> None:
        """Add bytes that are in place; report once enough were added."""
        # Tied weights count once for each name in the total, and parts of a tensor less than it.
        self._done = min(self._total, self._done + count)
        if self._done - self._told >= self._total * PART:
            self._tell()

    def finish(self) -> None:
        """Report that all bytes are in place."""
        self._done = self._total
        self._tell()

    def _tell(self) -> None:
        self._told = self._done
        self._report(self._done, self._total)
