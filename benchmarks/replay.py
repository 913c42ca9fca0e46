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
    """The interface shared by `StepScheduler` and its rivals."""

    def add(self, spec: RequestSpec, now_s: float) -> None:
        """Queue a request."""

    def next_tick(self, now_s: float) -> Tick | None:
        """Decide the tick to send at this virtual time. None while no request has a step to make, or all wait for company."""

    def observe(self, done: TickDone, now_s: float) -> object:
        """Take the report of the oldest tick that was sent."""

    def held_until_s(self) -> float | None:
        """When somebody stops to wait for company."""


class Device(Protocol):
    """The executor of ticks, in order, which reports the time of each."""

    def execute(self, tick: Tick) -> TickDone:
        """Run one tick."""


class Arrival(msgspec.Struct, frozen=True):
    """A request and when it comes."""

    at_s: float
    spec: RequestSpec


class Outcome(msgspec.Struct):
    """The outcome of the arrivals: seconds from arrival to image by request, the ticks, and the time the device worked."""

    latency_s: dict[str, float] = {}
    ticks: list[Tick] = []
    reports: list[TickDone] = []
    busy_s: float = 0.0
    largest_step: int = 0


class VirtualDevice:
    """Executes ticks in order; a request of n steps takes n + 1 of them, as on the ranks."""

    def __init__(self, cost: Cost, *, fits: Callable[[list[RequestSpec]], bool] = lambda _: True) -> None:
        self._cost = cost
        self._fits = fits
        self.left: dict[str, tuple[RequestSpec, int]] = {}

    def execute(self, tick: Tick) -> TickDone:
        """Run a tick; what does not fit in memory is run request by request, and what does not alone fails."""
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
    """Run until everything is done."""
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
    """Return the value that a share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
