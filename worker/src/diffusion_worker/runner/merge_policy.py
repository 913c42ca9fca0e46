# SPDX-License-Identifier: Apache-2.0
"""When an adapter that all traffic uses is merged into the weights: after a trial that was faster, and where it repays itself.

Values in, values out: who merges and measures is `adapter_merging`. An adapter is tried once per shape of call, after a run of
calls that all used it. After that it is merged again in every run in which the time that merging would have saved so far is
what merging costs: then at most twice the least possible time is lost, however long the run turns out to be.
"""

import statistics
from collections import deque
from collections.abc import Hashable

import msgspec

FIRST_TRIAL_CALLS = 32
TRIAL_CALLS = 8
# Less is as much as calls differ by themselves.
LEAST_GAIN = 0.02
# Adapters and shapes that are known; all are forgotten past that, and tried again.
MOST_KNOWN = 256

# An adapter with its strength, and the shape of a call.
Key = tuple[str, Hashable]


class Times(msgspec.Struct):
    """The newest times of calls of one adapter and shape, in seconds: beside the weights, and merged into them."""

    beside: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=TRIAL_CALLS))
    merged: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=TRIAL_CALLS))

    @property
    def gain(self) -> float | None:
        """What a call takes less when merged, 0 where that is not worth it; None while it is not known."""
        if len(self.beside) < TRIAL_CALLS or len(self.merged) < TRIAL_CALLS:
            return None
        before = statistics.median(self.beside)
        gain = before - statistics.median(self.merged)
        return gain if gain > LEAST_GAIN * before else 0.0


class MergePolicy:
    """Decides before each call, and is told afterwards how long it took."""

    def __init__(self) -> None:
        self._known: dict[Key, Times] = {}
        self._merging_s = 0.0
        self._restoring_s = 0.0
        self._merged: str | None = None
        # The run of calls that all used one adapter: which, how many, and what merging would have saved since it last was.
        self._adapter: str | None = None
        self._calls = 0
        self._lost_s = 0.0
        self._key: Key | None = None

    def decide(self, adapter: str | None, shape: Hashable) -> str | None:
        """The adapter to have merged in the call about to run: the one that all its rows use, or None.

        `adapter` is None for a call that nothing may be merged for: rows of several, of none, or exact ones.
        """
        if adapter != self._adapter:
            self._adapter, self._calls, self._lost_s = adapter, 0, 0.0
        self._key = None if adapter is None else (adapter, shape)
        merged = adapter if adapter is not None and self._pays(self._times()) else None
        if merged is not None and merged != self._merged:
            self._lost_s = 0.0
        self._merged = merged
        return merged

    def took(self, seconds: float) -> None:
        """The time of the call that was decided on last."""
        if self._key is None:
            return
        times = self._times()
        self._calls += 1
        if self._merged is not None:
            times.merged.append(seconds)
            return
        times.beside.append(seconds)
        self._lost_s += times.gain or 0.0

    def merging_took(self, seconds: float) -> None:
        """The time of a merge."""
        self._merging_s = seconds

    def restoring_took(self, seconds: float) -> None:
        """The time of making the weights their own again."""
        self._restoring_s = seconds

    def forget_merged(self) -> None:
        """The weights were given back or replaced: nothing is merged, and nothing that was measured is forgotten."""
        self._merged = None
        self._adapter = None

    def _times(self) -> Times:
        assert self._key is not None
        if self._key not in self._known and len(self._known) >= MOST_KNOWN:
            self._known.clear()
        return self._known.setdefault(self._key, Times())

    def _pays(self, times: Times) -> bool:
        gain, already = times.gain, self._merged == self._adapter
        if gain is None:
            # A trial goes on until its gain is known, also where another shape comes in between.
            return already or (len(times.beside) == TRIAL_CALLS and self._calls >= FIRST_TRIAL_CALLS)
        return gain > 0 and (already or self._lost_s >= self._merging_s + self._restoring_s)
