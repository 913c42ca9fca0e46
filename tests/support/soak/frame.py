# SPDX-License-Identifier: Apache-2.0
"""The frame of all parts of `make soak`: what a run came to, how long it goes on, what goes on beside it, and metrics.

Real: all of it; a part brings its own rig.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


class Outcome(SimpleNamespace):
    """The fields of one run, the seconds it took, and in words what was wrong. One field grows up to the number asked for: `counted`."""

    def __init__(self, seed: int, counted: str = "", **fields: Any) -> None:
        super().__init__(seed=seed, **fields, seconds=0.0, wrong=[])
        self._counted = counted

    @property
    def done(self) -> int:
        """Return how many of those asked for there were."""
        return getattr(self, self._counted, 0)

    def until(self, count: float, limit_s: float) -> Iterator[int]:
        """Go on until so many are done or the time is over."""
        started = time.monotonic()
        try:
            while self.done < count and time.monotonic() - started < limit_s:
                yield self.done
        finally:
            self.seconds = time.monotonic() - started

    def document(self) -> dict[str, Any]:
        """Return its fields, and floats in short."""
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in vars(self).items() if name != "_counted"}

    def line(self, name: str, wanted: int) -> str:
        """Return all of it, as one line of JSON after its name."""
        cut = "" if self.done >= wanted else f" (the time was over after {self.done} of {wanted})"
        return f"{name}{cut}: {json.dumps(self.document())}"


@contextmanager
def meanwhile(work: Callable[[threading.Event], None], outcome: Outcome) -> Iterator[None]:
    """Have a thread do something until the block ends, which sets its event. An error of its own is wrong."""
    over = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(work, over)
        try:
            yield
        finally:
            over.set()
    if error := working.exception():
        outcome.wrong.append(f"what went on meanwhile ended: {error!r}")


def those_that_hold(wrong: dict[str, Any]) -> list[str]:
    """Return the sentences that are true."""
    return [what for what, holds in wrong.items() if holds]


def metric_values(text: str) -> dict[str, float]:
    """Every line of Prometheus' text, by name and labels."""
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if not line.startswith("#")}


def total(values: dict[str, float], name: str) -> int:
    """Sum the values whose name and labels begin so."""
    return int(sum(value for found, value in values.items() if found.startswith(name)))
