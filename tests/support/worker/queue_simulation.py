# SPDX-License-Identifier: Apache-2.0
"""Clients of a bounded queue on a virtual clock, who come back at the time for which they were promised a place.

Real: the bounds, the scheduler, and what both learn from reports. Not real: the device, whose seconds come from a cost function.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from benchmarks.replay import VirtualDevice
from diffusion_worker.config import QueueLimits
from diffusion_worker.engine.scheduling.queue_bounds import Place, QueueBounds, Refusal
from diffusion_worker.engine.scheduling.scheduler import StepScheduler
from diffusion_worker.engine.scheduling.step_loop import TICKS_AHEAD
from diffusion_worker.messages import RequestSpec, TickDone


class Client(msgspec.Struct):
    """A request and its sender, who comes back after a refusal unless it `leaves`, slightly late because of the network."""

    at_s: float
    spec: RequestSpec
    size_bytes: int = 0
    leaves: bool = False
    refusals: int = 0


class Counts(msgspec.Struct):
    """The outcome: all clients, those that came back after their first refusal, those of them that were admitted then, and the device's
    work."""

    came: int = 0
    came_back: int = 0
    admitted_then: int = 0
    finished: int = 0
    refused: int = 0
    most_waiting: int = 0
    most_bytes: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    longest_retry_s: float = 0.0

    @property
    def kept(self) -> float:
        """Return the share of clients that were admitted when they first came back; 1.0 if none came back."""
        return self.admitted_then / self.came_back if self.came_back else 1.0


class QueueSimulation:
    """A worker's queue and scheduler over a virtual device, in virtual time. Each finished image also takes `decode_s`, which the
    denoising time in reports leaves out."""

    def __init__(
        self,
        limits: QueueLimits,
        cost: Callable[[list[RequestSpec]], float],
        *,
        batch: int = 8,
        seed: int = 0,
        decode_s: float = 0.0,
        noise: float = 0.1,
    ) -> None:
        self.bounds = QueueBounds(limits)
        self.counts = Counts()
        self._scheduler = StepScheduler(batch)
        self._device = VirtualDevice(cost)
        self._random = random.Random(seed)
        self._decode_s = decode_s
        self._noise = noise
        self._numbers = itertools.count()
        self._coming: list[tuple[float, int, Client]] = []
        self._places: dict[str, Place] = {}
        self._now_s = 0.0

    def run(self, clients: Sequence[Client]) -> Counts:
        """Run until all clients have gone, and return the counts."""
        for client in clients:
            self._expect(client, client.at_s)
        self.counts.came = len(clients)
        on_the_way: list[tuple[float, TickDone]] = []
        free_at_s = 0.0
        while True:
            while self._coming and self._coming[0][0] <= self._now_s:
                self._arrive(heapq.heappop(self._coming)[2])
            if on_the_way and on_the_way[0][0] <= self._now_s:
                self._report(on_the_way.pop(0)[1])
            elif len(on_the_way) < TICKS_AHEAD and (tick := self._scheduler.next_tick(self._now_s)) is not None:
                for spec in tick.join:
                    self.bounds.start(self._places[spec.request_id], self._now_s)
                done = self._slowed(self._device.execute(tick))
                free_at_s = max(free_at_s, self._now_s) + done.seconds
                self.counts.busy_s += done.seconds
                on_the_way.append((free_at_s, done))
            else:
                nexts = [*(at_s for at_s, _ in on_the_way[:1]), *(at_s for at_s, _, _ in self._coming[:1])]
                if not nexts:
                    return self.counts
                if not on_the_way:
                    self.counts.idle_s += min(nexts) - self._now_s
                self._now_s = max(self._now_s, min(nexts))

    def _expect(self, client: Client, at_s: float) -> None:
        heapq.heappush(self._coming, (at_s, next(self._numbers), client))

    def _arrive(self, client: Client) -> None:
        spec = client.spec
        got = self.bounds.admit(spec.request_id, partial(self._scheduler.expected_s, spec), client.size_bytes, self._now_s)
        self.counts.came_back += client.refusals == 1
        if isinstance(got, Refusal):
            client.refusals += 1
            self.counts.refused += 1
            self.counts.longest_retry_s = max(self.counts.longest_retry_s, got.retry_after_s)
            if not client.leaves:
                self._expect(client, self._now_s + got.retry_after_s + self._random.uniform(0.0, 0.3))
            return
        self.counts.admitted_then += client.refusals == 1
        self._places[spec.request_id] = got
        self._scheduler.add(spec, self._now_s)
        got.estimate = partial(self._scheduler.left_s, spec.request_id)
        self.counts.most_waiting = max(self.counts.most_waiting, self.bounds.waiting)
        self.counts.most_bytes = max(self.counts.most_bytes, self.bounds.size_bytes)

    def _slowed(self, done: TickDone) -> TickDone:
        factor = self._random.uniform(1 - self._noise, 1 + self._noise)
        seconds = done.denoise_seconds * factor
        return msgspec.structs.replace(done, denoise_seconds=seconds, seconds=seconds + self._decode_s * len(done.finished) + 1e-4)

    def _report(self, done: TickDone) -> None:
        self._scheduler.observe(done, self._now_s)
        for finished in done.finished:
            self.bounds.end(self._places.pop(finished.request_id), self._now_s, done=True)
            self.counts.finished += 1
