# SPDX-License-Identifier: Apache-2.0
"""Records of failed adapters that only calls brought: a few of them, for a while, as nothing else removes them."""

import asyncio
from collections.abc import Callable

from diffusion_worker.engine.adapters.adapter import Adapter

MOST = 64
KEPT_S = 3600.0


class FailedRecords:
    """The records of failures; the oldest is dropped when there are more than `MOST`, and each after `KEPT_S`."""

    def __init__(self, drop: Callable[[Adapter], None], *, keeps: Callable[[str], bool]) -> None:
        """Begin without records. `keeps` returns whether a name's record stays: options or custom resources want the adapter."""
        self._drop = drop
        self._keeps = keeps
        self._timers: dict[Adapter, asyncio.TimerHandle] = {}

    def add(self, adapter: Adapter) -> None:
        """Record that an adapter has just failed."""
        if self._keeps(adapter.name):
            return
        if (earlier := self._timers.pop(adapter, None)) is not None:
            earlier.cancel()
        self._timers[adapter] = asyncio.get_running_loop().call_later(KEPT_S, self._end, adapter)
        while len(self._timers) > MOST:
            self._end(next(iter(self._timers)))

    def _end(self, adapter: Adapter) -> None:
        self._timers.pop(adapter).cancel()
        self._drop(adapter)
