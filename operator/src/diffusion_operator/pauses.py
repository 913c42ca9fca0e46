# SPDX-License-Identifier: Apache-2.0
"""The pauses before whatever failed is tried again: an action, a call, a pass, a watch, a replica."""

from collections.abc import Callable
from typing import NamedTuple

JITTER = 0.3
"""The share by which a pause may be longer or shorter: many watches that broke at once come back one by one."""
MOST_DOUBLINGS = 30


class Backoff(NamedTuple):
    """Pauses that double with each failure in a row, from the first up to the longest."""

    first_s: float
    longest_s: float

    def after_s(self, failures: int) -> float:
        """Return the seconds to wait after so many failures in a row, at least one."""
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, MOST_DOUBLINGS))

    def jittered_s(self, failures: int, random: Callable[[], float]) -> float:
        """Return the same, longer or shorter by up to JITTER of it. `random` gives numbers in [0, 1)."""
        return self.after_s(failures) * (1 + JITTER * (2 * random() - 1))
