# SPDX-License-Identifier: Apache-2.0
"""A bound on the time of the patterns in an adapter's configuration, which are untrusted and are run as peft runs them.

Python's `re` can take forever on a short pattern, and cannot be interrupted. So the kernel ends the process of the load, by the
signal of a timer that counts its CPU time. In other processes nothing is bounded.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds left for all patterns together; None where they are not bounded.
_left_s: float | None = None


def limit(seconds: float) -> None:
    """Bound the CPU time of all later `counted` blocks together; the kernel kills this process when they exceed it."""
    global _left_s
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _left_s = seconds


@contextmanager
def counted() -> Iterator[None]:
    """Subtract the CPU time of the `with` block from the bound of `limit`; without a bound do nothing.

    The block must run on the main thread while no other thread computes, because the time is that of the whole process.
    """
    global _left_s
    if _left_s is None:
        yield
        return
    # A timer of zero seconds would be off.
    signal.setitimer(signal.ITIMER_PROF, max(_left_s, 0.001))
    try:
        yield
    finally:
        _left_s = signal.setitimer(signal.ITIMER_PROF, 0)[0]
