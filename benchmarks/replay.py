# SPDX-License-Identifier: Apache-2.0
"""Recorded arrivals replayed against a scheduler on a virtual clock, which runs while the device works and jumps while it waits.

The device takes what a cost function says, or runs real steps. The loop is that of `StepLoop`: at most `TICKS_AHEAD` ticks are
sent before the first of them is reported.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from diffusion_worker.engine.scheduling.step_loop import TICKS_AHEAD
from diffusion_worker.messages import ErrorReport, Failed, Finished, RequestSpec, Tick, TickDone

# Seconds of a step for the requests that are denoised in it.
Cost = Callable[[list[RequestSpec]], float]
# Time of a tick beside the denoiser.
TICK_S = 1e-4


class Policy(Protocol):
    """The interface of a scheduler in a replay, shared by `StepScheduler` and those it is compared with."""

    def add(self, spec: RequestSpec, now_s: float) -> None:
        """Queue a request."""

    def next_tick(self, now_s: float) -> Tick | None:
        """Return the tick to send at this virtual time. None while no request has a step to make, or all wait for company."""

    def observe(self, done: TickDone, now_s: float) -> object:
        """Take the report of the oldest tick that was sent and not yet reported."""

    def held_until_s(self) -> float | None:
        """Return the virtual time at which a request stops waiting for others to share its step; None if none waits so."""


class Device(Protocol):
    """The executor of ticks, which takes them in order and reports the seconds of each."""

    def execute(self, tick: Tick) -> TickDone:
        """Run one tick and return its report."""


class Arrival(msgspec.Struct, frozen=True):
    """A request, and the virtual time in seconds at which it comes."""

    at_s: float
    spec: RequestSpec


class Outcome(msgspec.Struct):
    """The result of a replay: latencies, ticks, their reports, and the seconds for which the device was busy.

    `latency_s` has the time from a request's arrival to its image, by request id; failed requests have none. `largest_step` is the highest
    number of requests denoised in one tick.
    """

    latency_s: dict[str, float] = {}
    ticks: list[Tick] = []
    reports: list[TickDone] = []
    busy_s: float = 0.0
    largest_step: int = 0


class VirtualDevice:
    """A device that computes nothing: the time of a tick comes from a cost function.

    A request of n steps takes n + 1 ticks, as on the ranks; 50 steps if it names none.
    """

    def __init__(self, cost: Cost, *, fits: Callable[[list[RequestSpec]], bool] = lambda _: True) -> None:
        self._cost = cost
        self._fits = fits
        self.left: dict[str, tuple[RequestSpec, int]] = {}

    def execute(self, tick: Tick) -> TickDone:
        """Run a tick. If its requests do not fit in memory together, each is run alone; one that does not fit alone fails."""
        for name in tick.leave:
            self.left.pop(name, None)
        for spec in tick.join:
            self.left[spec.request_id] = (spec, (spec.steps or 50) + 1)
        here = [name for name in tick.advance or () if name in self.left]
        finished = [name for name in here if self.left[name][1] == 1]
        denoised = [self.left[name][0] for name in here if name not in finished]
        split = bool(denoised) and not self._fits(denoised)
        failed = [spec.request_id for spec in denoised if split and not self._fits([spec])]
        groups = [[spec] for spec in denoised] if split else [denoised]
        seconds = sum(self._cost(group) for group in groups if group)
        for name in here:
            self.left[name] = (self.left[name][0], self.left[name][1] - 1)
        for name in finished + failed:
            del self.left[name]
        return TickDone(
            tick.number,
            [Finished(name, index, (8, 8, 3)) for index, name in enumerate(finished)],
            [Failed(name, ErrorReport("InsufficientMemory", "out of memory")) for name in failed],
            rows=len(denoised),
            calls=len([group for group in groups if group]),
            seconds=seconds + TICK_S,
            denoise_seconds=seconds,
            split=split,
        )


def replay(policy: Policy, arrivals: Sequence[Arrival], device: Device) -> Outcome:
    """Replay arrivals against a scheduler and a device, until none is to come, none runs and the scheduler holds none; return the outcome.

    Raises:
        RuntimeError: a request finished twice.
    """
    outcome = Outcome()
    coming = sorted(arrivals, key=lambda arrival: arrival.at_s)
    came = {arrival.spec.request_id: arrival.at_s for arrival in coming}
    position, now_s = 0, 0.0
    on_the_way: list[tuple[float, TickDone]] = []
    free_at_s = 0.0
    while True:
        while position < len(coming) and coming[position].at_s <= now_s:
            policy.add(coming[position].spec, coming[position].at_s)
            position += 1
        if on_the_way and on_the_way[0][0] <= now_s:
            _, done = on_the_way.pop(0)
            policy.observe(done, now_s)
            for finished in done.finished:
                if finished.request_id in outcome.latency_s:
                    raise RuntimeError(f"{finished.request_id} finished twice")
                outcome.latency_s[finished.request_id] = now_s - came[finished.request_id]
            continue
        tick = policy.next_tick(now_s) if len(on_the_way) < TICKS_AHEAD else None
        if tick is not None:
            done = device.execute(tick)
            free_at_s = max(free_at_s, now_s) + done.seconds
            on_the_way.append((free_at_s, done))
            outcome.ticks.append(tick)
            outcome.reports.append(done)
            outcome.busy_s += done.seconds
            outcome.largest_step = max(outcome.largest_step, done.rows)
            continue
        held_until_s = policy.held_until_s()
        nexts = [on_the_way[0][0]] if on_the_way else [held_until_s] if held_until_s is not None else []
        nexts += [coming[position].at_s] if position < len(coming) else []
        if not nexts:
            break
        now_s = max(now_s, min(nexts))
    return outcome


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value at position `share` of the sorted values: about that share of them is smaller. There has to be a value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
