# SPDX-License-Identifier: Apache-2.0
"""Bounds the time that the patterns of an adapter's configuration take: they are a stranger's, and run as peft runs them.

Python's `re` can take for ever on a short pattern, and cannot be interrupted. So the kernel ends the process of the load, by the
signal of a timer that counts its CPU. Elsewhere nothing is bounded.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds left for all patterns together; None where they are not bounded.
_left_s: float | None = None


def limit(seconds: float) -> None:
    """From now on this process ends when patterns have taken so much CPU."""
    global _left_s
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _left_s = seconds


@contextmanager
def counted() -> Iterator[None]:
    """Count the time of what runs inside, which is on the main thread and while no other computes."""
    global _left_s
    if _left_s is None:
        yield
        return
    # A time of zero would mean none.
    signal.setitimer(signal.ITIMER_PROF, max(_left_s, 0.001))
    try:
        yield
    finally:
        _left_s = signal.setitimer(signal.ITIMER_PROF, 0)[0]
