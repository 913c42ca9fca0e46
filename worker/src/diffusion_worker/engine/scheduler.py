# SPDX-License-Identifier: Apache-2.0
"""Which requests run: first in, first out, up to the batch size. Pure: requests in, ticks out."""

from collections import deque

from diffusion_worker.messages import RequestSpec, Tick


class StepScheduler:
    """Waiting and running requests of one rank group, and the tick that moves them on."""

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._waiting: deque[RequestSpec] = deque()
        self._running: set[str] = set()
        self._leaving: list[str] = []
        self._ticks = 0

    @property
    def waiting(self) -> int:
        """Requests that have not joined yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests on the ranks."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether another tick would do anything."""
        return bool(self._running or self._waiting or self._leaving)

    def add(self, spec: RequestSpec) -> None:
        """Queue a request."""
        self._waiting.append(spec)

    def remove(self, request_id: str) -> None:
        """A request is not wanted any more: it leaves with the next tick, or never joins."""
        if request_id in self._running:
            self._running.discard(request_id)
            self._leaving.append(request_id)
        else:
            self._waiting = deque(spec for spec in self._waiting if spec.request_id != request_id)

    def finished(self, request_id: str) -> None:
        """The ranks are done with a request."""
        self._running.discard(request_id)

    def next_tick(self) -> Tick:
        """The next step for all that run, with those that leave and join before it."""
        self._ticks += 1
        room = self._max_batch_size - len(self._running)
        join = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        self._running.update(spec.request_id for spec in join)
        leave, self._leaving = self._leaving, []
        return Tick(self._ticks, join, leave)
