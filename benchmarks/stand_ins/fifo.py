# SPDX-License-Identifier: Apache-2.0
"""The policy that the scheduler is measured against: one request at a time, each run to its end, in the order they came."""

from collections import deque

from diffusion_worker.messages import RequestSpec, Tick, TickDone


class FifoScheduler:
    """First come, first served, run to completion. Sends ahead as the real one does, and knows when a request ends."""

    def __init__(self) -> None:
        self._waiting: deque[RequestSpec] = deque()
        self._left = 0
        self._running: RequestSpec | None = None
        self._number = 0

    def add(self, spec: RequestSpec, now_s: float) -> None:
        """Queue a request."""
        self._waiting.append(spec)

    def next_tick(self, now_s: float) -> Tick | None:
        """Return the next step of the running request, or the first step of the next request."""
        join: list[RequestSpec] = []
        if self._left == 0:
            if not self._waiting:
                return None
            self._running = self._waiting.popleft()
            assert self._running.steps is not None
            self._left = self._running.steps + 1
            join = [self._running]
        self._left -= 1
        self._number += 1
        assert self._running is not None
        return Tick(self._number, join, [], [self._running.request_id])

    def observe(self, done: TickDone, now_s: float) -> None:
        """Nothing is learned."""

    def held_until_s(self) -> float | None:
        """Nobody waits for company."""
        return None
