# SPDX-License-Identifier: Apache-2.0
"""P7: nine small requests of 4 steps to each large one of 50, at random times, at 0.8 of what the device can do.

The engine's scheduler against first come, first served, each request run to its end: the same arrivals, runner and steps, in adjacent
pairs. Steps are real ones of a tiny transformer. The clock counts their seconds and jumps while nobody is there, so that a minute of
arrivals takes less. The same arrivals, and 5,000 more, are also replayed on the measured costs alone.

A machine with two cores does not show three things. Steps of a large model on a GPU should be preempted as cheaply, because its latents
stay on the device. The curve of its costs may bend elsewhere: here 32 pixels are bound by launches and 128 by arithmetic, and there 512
and 1024 are. The shares of the server and the ranks in a step differ too.
"""

import random
import statistics

import msgspec

from benchmarks.pairs import TINY_PLAN, Plan, Times, take_pairs
from benchmarks.replay import Arrival, Device, Outcome, Policy, VirtualDevice, percentile, replay
from benchmarks.result import Measured
from benchmarks.stand_ins.fifo import FifoScheduler
from benchmarks.stand_ins.tiny_dit import TinyDevice, request
from diffusion_worker.engine.scheduling.scheduler import StepScheduler
from diffusion_worker.messages import RequestSpec

# Pixels of a side, and steps.
SMALL, LARGE = (32, 4), (128, 50)
LARGE_SHARE = 0.1
LOAD = 0.8
BATCH = 8
TARGETS = {"small_p99_gain": ">= 10", "large_p99_ratio": ">= 0.8", "throughput_ratio": ">= 1.0"}


class Size(msgspec.Struct, frozen=True):
    """The size of a run: arrivals on real steps, arrivals on measured costs, requests made alone, and the plan for the pairs.

    `large` are the pixels of a large request's side, and its steps. `cost_steps` are those that a cost is the median of, and two more.
    """

    arrivals: int = 320
    virtual: int = 5000
    # Requests made alone, to know what one takes.
    alone: int = 5
    large: tuple[int, int] = LARGE
    cost_steps: int = 7
    plan: Plan = Plan(wanted=5, at_most=15, within_s=360)


# The least that has both kinds in it.
TINY = Size(arrivals=24, virtual=48, alone=1, large=(48, 8), cost_steps=3, plan=TINY_PLAN)


def measure(*, tiny: bool = False) -> Measured:
    """Measure our scheduler against first come, first served: tail latencies of both classes, and the time the device worked.

    In each ratio more than 1 means that ours is better.
    """
    size = TINY if tiny else Size()
    with TinyDevice() as device:
        for side, steps in (SMALL, size.large):
            device.run_together([request("warm", side=side, steps=steps)])
        service_s = {kind: _service_s(device, *kind, rounds=size.alone) for kind in (SMALL, size.large)}
        arrivals = _arrivals(size.arrivals, service_s, seed=7)
        pairs = take_pairs(
            "first come, first served",
            lambda: _times(FifoScheduler(), arrivals, device),
            lambda: _times(StepScheduler(BATCH), arrivals, device),
            by="busy_s",
            plan=size.plan,
        )
        virtual = _virtual(_costs(device, size), service_s, size.virtual)
    figures = {name: 1 / pairs.ratio(of) for name, of in RATIOS.items()}
    figures |= {f"virtual_{name}": value for name, value in virtual.items()}
    return Measured({name: round(value, 3) for name, value in figures.items()}, TARGETS, [*pairs.samples(), virtual], [pairs])


def _service_s(device: TinyDevice, side: int, steps: int, *, rounds: int) -> float:
    """Return the seconds of a request that has the device to itself: the fastest of `rounds` runs."""
    return min(sum(done.seconds for done in device.run_together([request("alone", side=side, steps=steps)])) for _ in range(rounds))


def _arrivals(count: int, service_s: dict[tuple[int, int], float], *, seed: int) -> list[Arrival]:
    rng = random.Random(seed)
    small, large = service_s
    mean_s = ((1 - LARGE_SHARE) * service_s[small] + LARGE_SHARE * service_s[large]) / LOAD
    arrivals, now_s = [], 0.0
    for number in range(count):
        now_s += rng.expovariate(1 / mean_s)
        kind = large if rng.random() < LARGE_SHARE else small
        name = f"{'large' if kind is large else 'small'}-{number}"
        arrivals.append(Arrival(now_s, request(name, side=kind[0], steps=kind[1], seed=number)))
    return arrivals


def _run(policy: Policy, arrivals: list[Arrival], device: Device) -> Outcome:
    outcome = replay(policy, arrivals, device)
    if len(outcome.latency_s) != len(arrivals):
        raise RuntimeError(f"{len(arrivals) - len(outcome.latency_s)} requests were not answered")
    return outcome


# Each ratio, and the time that it compares: theirs over ours.
RATIOS = {"small_p99_gain": "small_p99_s", "large_p99_ratio": "large_p99_s", "throughput_ratio": "busy_s", "mean_gain": "mean_s"}


def _times(policy: Policy, arrivals: list[Arrival], device: Device) -> Times:
    outcome = _run(policy, arrivals, device)
    return {
        "small_p99_s": _p99(outcome, "small"),
        "large_p99_s": _p99(outcome, "large"),
        "busy_s": outcome.busy_s,
        "mean_s": statistics.mean(outcome.latency_s.values()),
    }


def _p99(outcome: Outcome, kind: str) -> float:
    return percentile([seconds for name, seconds in outcome.latency_s.items() if name.startswith(kind)], 0.99)


def _costs(device: TinyDevice, size: Size) -> dict[tuple[int, int], float]:
    """Measure the duration of a step for each image size and batch size.

    Returns median seconds, keyed by the image's side in pixels and the number of requests. Ticks at either end of a run do not count.
    """
    costs = {}
    for side, _ in (SMALL, size.large):
        for batch in range(1, BATCH + 1):
            reports = device.run_together([request(f"{batch}-{n}", side=side, steps=size.cost_steps) for n in range(batch)])
            costs[side, batch] = statistics.median(done.seconds for done in reports[1:-1])
    return costs


def _virtual(costs: dict[tuple[int, int], float], service_s: dict[tuple[int, int], float], count: int) -> dict[str, float]:
    def cost(specs: list[RequestSpec]) -> float:
        assert specs[0].height is not None
        return costs[specs[0].height, len(specs)]

    alone_s = {(side, steps): steps * costs[side, 1] for side, steps in service_s}
    arrivals = _arrivals(count, alone_s, seed=11)
    fifo = _times(FifoScheduler(), arrivals, VirtualDevice(cost))
    ours = _times(StepScheduler(BATCH), arrivals, VirtualDevice(cost))
    return {name: fifo[of] / ours[of] for name, of in RATIOS.items()}
