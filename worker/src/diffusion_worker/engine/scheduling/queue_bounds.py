# SPDX-License-Identifier: Apache-2.0
"""The bounds of the queue, and the time at which a refused request finds room. Pure: time is a parameter.

The expected cost of the admitted requests' steps gives the time, at the pace that was measured.
"""

import enum
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable

import msgspec

from diffusion_worker.config import QueueLimits
from diffusion_worker.engine.scheduling.pace import Pace

# Factor on expected times: coming back a little late costs a client less than being refused twice.
MARGIN = 1.15
# Age at which estimates of the remaining work are made again.
REFRESH_S = 1.0


class Bound(enum.StrEnum):
    """The three bounds of the queue: its waiting requests, its seconds of expected work, and the bytes of its decoded input images."""

    REQUESTS = "requests"
    SECONDS = "seconds"
    BYTES = "bytes"


class Demand(msgspec.Struct, frozen=True):
    """Expected seconds of the device, and bytes of decoded input images, of one request."""

    seconds: float = 0.0
    size_bytes: int = 0


class Place(msgspec.Struct, eq=False):
    """An admitted request. `estimate` returns the seconds that it still needs. `left_s` is the last estimate, `work_s` all its work."""

    demand: Demand
    estimate: Callable[[], float]
    work_s: float
    left_s: float
    started: bool = False


class Refusal(msgspec.Struct, frozen=True):
    """The bound that refused a request, the amount found, the most that is allowed, and the seconds until there is room."""

    bound: Bound
    found: float
    most: float
    retry_after_s: float


class QueueBounds:
    """Admits requests within the bounds. The holder of a place calls `start` when it joins a step, and `end` however it ends."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self._pace = Pace()
        self._places: dict[Place, None] = {}
        self._running = 0
        self._left_s = 0.0
        self._size_bytes = 0
        self._refreshed_s = -math.inf

    @property
    def waiting(self) -> int:
        """Requests that wait for their first step."""
        return len(self._places) - self._running

    @property
    def left_s(self) -> float:
        """Seconds of expected work that is left of all admitted requests, running ones included, by their last estimates."""
        return self._left_s

    @property
    def size_bytes(self) -> int:
        """Bytes of the decoded input images of all admitted requests."""
        return self._size_bytes

    def admit(self, estimate: Callable[[], float], size_bytes: int, now_s: float, *, cold_s: float = 0.0) -> Place | Refusal:
        """Return a place for a request, or its refusal with the time to come back.

        `estimate` returns its seconds of work, and `cold_s` is the time until any first step.
        """
        self._refresh(now_s)
        demand = Demand(estimate(), size_bytes)
        if (bound := self._met(demand)) is not None:
            again_s = max(1, math.ceil(self._room_in_s(demand) * self._pace.ratio * MARGIN + cold_s))
            return Refusal(bound, *self._amounts(bound, demand), retry_after_s=float(again_s))
        place = Place(demand, estimate, demand.seconds, demand.seconds)
        self._places[place] = None
        self._left_s += demand.seconds
        self._size_bytes += demand.size_bytes
        return place

    def start(self, place: Place, now_s: float) -> None:
        """Note that a request joins its first step; no effect if it was noted before or its place has ended."""
        if place in self._places and not place.started:
            place.started = True
            self._running += 1
            if self._running == 1:
                self._pace.begin(now_s)

    def revise(self, place: Place, estimate: Callable[[], float]) -> None:
        """Replace the estimate of an admitted request by a better one, whose present result counts as all its work."""
        place.estimate = estimate
        place.work_s = estimate()
        self._left_s += place.work_s - place.left_s
        place.left_s = place.work_s

    def end(self, place: Place, now_s: float, *, done: bool) -> None:
        """Free a place, once. With `done` its images were made, so its work counts for the pace while others still wait."""
        del self._places[place]
        self._running -= place.started
        self._left_s -= place.left_s
        self._size_bytes -= place.demand.size_bytes
        if not self._places:
            self._left_s = 0.0  # without rounding errors
        if not self.waiting:
            self._pace.begin(now_s)  # batches that are not full say nothing about full ones
        elif done and place.work_s:
            self._pace.done(place.work_s, now_s)

    # --- admission ------------------------------------------------------------------------------------------------------

    def _met(self, demand: Demand) -> Bound | None:
        """Return the bound that a request would exceed now, if any. A request that exceeds one by itself is admitted once it is alone."""
        limits = self.limits
        if self.waiting + 1 > limits.max_queued and self._places:
            return Bound.REQUESTS
        if self._left_s + demand.seconds > limits.max_queued_seconds and self._places:
            return Bound.SECONDS
        if self._size_bytes + demand.size_bytes > limits.max_queued_bytes and self._size_bytes and demand.size_bytes:
            return Bound.BYTES
        return None

    def _room_in_s(self, demand: Demand) -> float:
        """Return the seconds of work to be done until a request fits behind the admitted ones, in their order."""
        limits, length = self.limits, len(self._places)
        seconds = [0.0, *itertools.accumulate(place.left_s for place in self._places)]
        sizes = [0, *itertools.accumulate(place.demand.size_bytes for place in self._places)]
        gone = max(0, length + 1 - self._running - limits.max_queued)
        if (over := sizes[length] + demand.size_bytes - limits.max_queued_bytes) > 0:
            gone = max(gone, min(length, bisect_left(sizes, over)))
        # Requests of one batch end together, so the last of them decides.
        waits_s = seconds[min(length, gone + max(0, self._running - 1))] if gone else 0.0
        over_s = seconds[length] + demand.seconds - limits.max_queued_seconds
        if over_s > 0:
            # Wait for the end of the request in which that work gets done: a request's end is better known than its progress.
            waits_s = max(waits_s, seconds[min(length, bisect_left(seconds, over_s))])
        return waits_s

    def _amounts(self, bound: Bound, demand: Demand) -> tuple[float, float]:
        """Return the amount of a bound that there would be with the request, and the most that it allows."""
        if bound is Bound.REQUESTS:
            return self.waiting + 1, self.limits.max_queued
        if bound is Bound.SECONDS:
            return self._left_s + demand.seconds, self.limits.max_queued_seconds
        return self._size_bytes + demand.size_bytes, self.limits.max_queued_bytes

    def _refresh(self, now_s: float) -> None:
        """Estimate again the work left of every request, if the last estimates are old."""
        if now_s - self._refreshed_s < REFRESH_S:
            return
        self._refreshed_s = now_s
        for place in self._places:
            place.left_s = place.estimate()
            if not place.started:
                place.work_s = place.left_s
        self._left_s = math.fsum(place.left_s for place in self._places)
