# SPDX-License-Identifier: Apache-2.0
"""The baseline of the scheduler's benchmark: one request at a time, in the order of arrival, each run to its end."""

from collections import deque

from diffusion_worker.messages import RequestSpec, Tick, TickDone


class FifoScheduler:
    """A scheduler that runs the oldest request to its end before the next one starts.

    It may be asked for the next tick before the last one is done, as the real scheduler is; it counts each request's steps itself.
    """

    def __init__(self) -> None:
        self._waiting: deque[RequestSpec] = deque()
        self._left = 0
        self._running: RequestSpec | None = None
        self._number = 0

    def add(self, spec: RequestSpec, now_s: float) -> None:
        """Queue a request."""
        self._waiting.append(spec)

    def next_tick(self, now_s: float) -> Tick | None:
        """Return the next step of the running request, or the first step of the oldest waiting one; None if there is neither."""
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
        """Ignore the outcome of a tick: this scheduler measures nothing."""

    def held_until_s(self) -> float | None:
        """Return None: no request is held until others may join it."""
        return None
