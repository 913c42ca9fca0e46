# SPDX-License-Identifier: Apache-2.0
"""The bounds of the queue, and the time at which a refused request finds room. Pure: time is a parameter.

A refused request is promised a place behind the admitted requests and the earlier promises. The expected cost of their steps gives the
time. A promise is kept until that time and `LATE_S` longer, and meanwhile no other request takes a place that it needs. A client that
comes back is recognized only by its request, which has to be the same again.
"""

import enum
import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Sequence

import msgspec

from diffusion_worker.config import QueueLimits
from diffusion_worker.engine.scheduling.pace import Pace

# Factor on expected times: coming back a little late costs a client less than being refused twice.
LEAST_MARGIN, MOST_MARGIN = 1.15, 2.0
# The factor grows with each client that came at its time and found no room, and shrinks with each that found room.
GROWS, SHRINKS = 1.04, 0.997
# A client that comes at most so much before its promised time counts as on time.
EARLY_S = 0.25
# Factor on the bound of seconds for a client that comes at its promised time, because estimates of the work before it may have grown.
KEPT_PROMISE = 1.1
# A promise ends so long after its time.
LATE_S = 10.0
# Promises that are kept at most; beyond them a refused request only gets a time.
MOST_PROMISES = 1024
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


class _Promise(msgspec.Struct, eq=False):
    key: Hashable
    due_s: float
    demand: Demand


class _Line:
    """The requests ahead of another one, in order, with the sums of their seconds and bytes from the first on."""

    def __init__(self, limits: QueueLimits, running: int, ahead: Iterable[tuple[float, int]]) -> None:
        ahead = list(ahead)
        self._limits = limits
        self._running = running
        self._seconds = [0.0, *itertools.accumulate(seconds for seconds, _ in ahead)]
        self._bytes = [0, *itertools.accumulate(size_bytes for _, size_bytes in ahead)]

    def wait_s(self, demand: Demand, length: int) -> float:
        """Return the seconds of work to be done until a request fits behind the first `length` of the line; 0 if it fits now."""
        limits, seconds = self._limits, self._seconds
        gone = max(0, length + 1 - self._running - limits.max_queued)
        if (over := self._bytes[length] + demand.size_bytes - limits.max_queued_bytes) > 0:
            gone = max(gone, min(length, bisect_left(self._bytes, over)))
        # Requests of one batch end together, so the last of them decides.
        waits_s = seconds[min(length, gone + max(0, self._running - 1))] if gone else 0.0
        over_s = seconds[length] + demand.seconds - limits.max_queued_seconds
        if over_s > 0:
            # Wait for the end of the request in which that work gets done: a request's end is better known than its progress.
            waits_s = max(waits_s, seconds[min(length, bisect_left(seconds, over_s))])
        return waits_s


class QueueBounds:
    """Admits requests within the bounds. The holder of a place calls `start` when it joins a step, and `end` however it ends."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self._pace = Pace()
        self._margin = LEAST_MARGIN
        self._places: dict[Place, None] = {}
        self._promises: list[_Promise] = []
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

    @property
    def promised(self) -> int:
        """Number of open promises."""
        return len(self._promises)

    def admit(self, key: Hashable, estimate: Callable[[], float], size_bytes: int, now_s: float, *, cold_s: float = 0.0) -> Place | Refusal:
        """Return a place for a request, or its refusal with the time to come back.

        `key` recognizes a request that comes again. `estimate` returns its seconds of work, and `cold_s` is the time until any first step.
        """
        self._forget_late(now_s)
        self._refresh(now_s)
        demand = Demand(estimate(), size_bytes)
        own = next((promise for promise in self._promises if promise.key == key), None)
        on_time = own is not None and own.due_s <= now_s + EARLY_S
        bound = self._met(demand, promised=on_time)
        if bound is None and not on_time and self._promises:
            bound = self._broken(demand, own, now_s, cold_s)
        if on_time:
            factor = SHRINKS if bound is None else GROWS
            self._margin = min(MOST_MARGIN, max(LEAST_MARGIN, self._margin * factor))
        if own is not None and (bound is None or on_time):
            self._promises.remove(own)
        if bound is None:
            return self._placed(demand, estimate)
        return self._refused(bound, demand, key, own, now_s, cold_s)

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

    def _met(self, demand: Demand, *, promised: bool) -> Bound | None:
        """Return the bound that a request would exceed now, if any; it may exceed the seconds a little if it has a promise for now.

        A request that exceeds a bound by itself is admitted once it is alone.
        """
        limits = self.limits
        most_s = limits.max_queued_seconds * (KEPT_PROMISE if promised else 1.0)
        if self.waiting + 1 > limits.max_queued and self._places:
            return Bound.REQUESTS
        if self._left_s + demand.seconds > most_s and self._places:
            return Bound.SECONDS
        if self._size_bytes + demand.size_bytes > limits.max_queued_bytes and self._size_bytes and demand.size_bytes:
            return Bound.BYTES
        return None

    def _broken(self, demand: Demand, own: _Promise | None, now_s: float, cold_s: float) -> Bound | None:
        """Return Bound.REQUESTS if this request would take a place that the promise to another one needs; else None."""
        others = [promise for promise in self._promises if promise is not own]
        line = self._line([demand, *(promise.demand for promise in others)])
        for index, promise in enumerate(others):
            wait_s = line.wait_s(promise.demand, len(self._places) + 1 + index)
            if wait_s and wait_s * self._pace.ratio * self._margin + cold_s > max(0.0, promise.due_s - now_s):
                return Bound.REQUESTS
        return None

    def _placed(self, demand: Demand, estimate: Callable[[], float]) -> Place:
        place = Place(demand, estimate, demand.seconds, demand.seconds)
        self._places[place] = None
        self._left_s += demand.seconds
        self._size_bytes += demand.size_bytes
        return place

    def _refused(self, bound: Bound, demand: Demand, key: Hashable, own: _Promise | None, now_s: float, cold_s: float) -> Refusal:
        """Refuse a request and promise it a place behind the earlier promises; a client that comes early keeps its promise.

        Beyond `MOST_PROMISES` promises the refusal only has a time.
        """
        if own is not None and own in self._promises:
            due_s = own.due_s
        else:
            before = [promise.demand for promise in self._promises if own is None or promise.due_s <= own.due_s]
            line = self._line(before)
            wait_s = line.wait_s(demand, len(self._places) + len(before)) * self._pace.ratio * self._margin + cold_s
            due_s = now_s + max(1, math.ceil(wait_s))
            if len(self._promises) < MOST_PROMISES:
                insort(self._promises, _Promise(key, due_s, demand), key=lambda promise: promise.due_s)
        return Refusal(bound, *self._amounts(bound, demand), retry_after_s=float(max(1, math.ceil(due_s - now_s))))

    def _amounts(self, bound: Bound, demand: Demand) -> tuple[float, float]:
        """Return the amount of a bound that there would be with the request, promises left out, and the most that it allows."""
        if bound is Bound.REQUESTS:
            return self.waiting + 1, self.limits.max_queued
        if bound is Bound.SECONDS:
            return self._left_s + demand.seconds, self.limits.max_queued_seconds
        return self._size_bytes + demand.size_bytes, self.limits.max_queued_bytes

    def _line(self, behind: Sequence[Demand]) -> _Line:
        here = ((place.left_s, place.demand.size_bytes) for place in self._places)
        return _Line(self.limits, self._running, itertools.chain(here, ((demand.seconds, demand.size_bytes) for demand in behind)))

    def _forget_late(self, now_s: float) -> None:
        while self._promises and self._promises[0].due_s + LATE_S < now_s:
            del self._promises[0]

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
