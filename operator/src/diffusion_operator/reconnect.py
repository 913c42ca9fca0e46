# SPDX-License-Identifier: Apache-2.0
"""The pauses before a watch that broke is opened again, of the API server's objects and of workers."""

from collections.abc import Callable

JITTER = 0.3
"""The share by which a pause may be longer or shorter: many watches that broke at once come back one by one."""


def reconnect_s(failures: int, *, first_s: float, longest_s: float, random: Callable[[], float]) -> float:
    """Return the seconds to wait after so many failures in a row, at least one: doubled each time up to `longest_s`, with jitter.

    `random` gives numbers in [0, 1).
    """
    pause_s: float = min(longest_s, first_s * 2 ** min(failures - 1, 10))
    return pause_s * (1 + JITTER * (2 * random() - 1))
