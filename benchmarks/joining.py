# SPDX-License-Identifier: Apache-2.0
"""P8: requests that join and leave at any step, against the best static batch; and against one by one where batching cannot help.

`vs_static_batch`: images of 32 pixels, whose steps are bound by launches. A static batch of N starts N requests at once and ends
them together. The scheduler is compared with the best N of 1 to 16. It knows the costs of such steps, and always has waiting requests
of different lengths.
`vs_serial_saturated`: images of 192 pixels, whose steps are bound by arithmetic, all there from the start, against one at a time.
Both count rows of steps per second that the thread computed, on the real runner. Decoding is left out of the first, because requests that
end at different steps decode alone. For a decoder that is bound by launches, as the tiny model's is, that is dear. For one that is bound
by arithmetic it should cost nothing (not measured). `vs_static_batch_decoded` is the same with decoding.

Not shown on a machine with two cores: the same on a GPU, where launches cost more and larger batches pay.
"""

import itertools
import random

import msgspec

from benchmarks.pairs import TINY_PLAN, Pairs, Plan, Times, take_pairs
from benchmarks.replay import Arrival, Policy, replay
from benchmarks.result import Measured
from benchmarks.stand_ins.fifo import FifoScheduler
from benchmarks.stand_ins.tiny_dit import TinyDevice, request
from diffusion_worker.engine.scheduling.scheduler import StepScheduler

SMALL_SIDE, LARGE_SIDE = 32, 192
# The average is 12; the static batch has exactly 12.
STEPS = 12
LENGTHS = (6, 8, 10, 12, 14, 16, 18)
BATCHES = (1, 2, 4, 8, 16)
TARGETS = {"vs_static_batch": ">= 0.95", "vs_serial_saturated": ">= 0.98", "vs_static_batch_decoded": ">= 0.95"}


class Size(msgspec.Struct, frozen=True):
    """The size of a run: requests of the joining run, requests of the saturated run, and the plan for the pairs of each comparison."""

    requests: int = 160
    large_requests: int = 8
    plan: Plan = Plan(wanted=7, within_s=120)


TINY = Size(requests=18, large_requests=1, plan=TINY_PLAN)


def measure(*, tiny: bool = False) -> Measured:
    """Measure our time per row of a step against the best static batch, and against one request after another.

    Ratios are throughputs: above 1 ours is faster.
    """
    size = TINY if tiny else Size()
    with TinyDevice() as device:
        for side, batch in itertools.product((SMALL_SIDE, LARGE_SIDE), (1, 2)):
            device.run_together([request(f"warm-{n}", side=side, steps=3) for n in range(batch)])
        learned = StepScheduler(max(BATCHES))
        _run(learned, _joining(size.requests // 2, 0), device)
        device.decodes = False
        static = {batch: _static(device, batch, size)["step_s"] for batch in BATCHES}
        best = min(static, key=lambda batch: static[batch])
        joined = _joined("static batches", device, learned, best, size)
        device.decodes = True
        decoded = _joined("static batches with decoding", device, learned, best, size)
        saturated = _saturated(device, size)
    figures = {
        "vs_static_batch": 1 / joined.ratio(),
        "vs_serial_saturated": 1 / saturated.ratio(),
        "vs_static_batch_decoded": 1 / decoded.ratio(),
        "best_batch": float(best),
        "batch_gain": static[1] / static[best],
        "static_rate": 1 / joined.baseline("step_s"),
        "serial_rate": 1 / saturated.baseline("step_s"),
    }
    judged = [joined, saturated, decoded]
    samples = [sample for pairs in judged for sample in pairs.samples()]
    return Measured({name: round(value, 3) for name, value in figures.items()}, TARGETS, samples, judged)


def _joined(what: str, device: TinyDevice, learned: StepScheduler, best: int, size: Size) -> Pairs:
    """Compare our scheduler, on waiting requests in another order each time, with a static batch of `best` requests before and after."""
    seeds = itertools.count(1)
    return take_pairs(
        what,
        lambda: _static(device, best, size),
        lambda: _run(learned, _joining(size.requests, next(seeds)), device, full_batch=True),
        by="step_s",
        plan=size.plan,
    )


def _saturated(device: TinyDevice, size: Size) -> Pairs:
    waiting = [Arrival(0.0, request(f"{n}", side=LARGE_SIDE, steps=STEPS, seed=n)) for n in range(size.large_requests)]
    return take_pairs(
        "one request after another",
        lambda: _run(FifoScheduler(), waiting, device),
        lambda: _run(StepScheduler(max(BATCHES)), waiting, device),
        by="step_s",
        plan=size.plan,
    )


def _static(device: TinyDevice, batch: int, size: Size) -> Times:
    """Return the seconds per row of a step when groups of `batch` equal requests start and end together.

    It makes about half as many requests as `size` has for ours, and one group at least.
    """
    groups = max(1, size.requests // 2 // batch)
    seconds = 0.0
    for group in range(groups):
        specs = [request(f"{group}-{n}", side=SMALL_SIDE, steps=STEPS, seed=n) for n in range(batch)]
        seconds += sum(done.seconds for done in device.run_together(specs))
    return {"step_s": seconds / (groups * batch * STEPS)}


def _joining(count: int, seed: int) -> list[Arrival]:
    """Make `count` requests of different lengths that all wait from the start, shuffled by `seed`.

    Each can join while others are in the middle of their steps.
    """
    rng = random.Random(seed)
    lengths = [LENGTHS[n % len(LENGTHS)] for n in range(count)]
    rng.shuffle(lengths)
    return [Arrival(0.0, request(f"{n}", side=SMALL_SIDE, steps=steps, seed=n)) for n, steps in enumerate(lengths)]


def _run(policy: Policy, arrivals: list[Arrival], device: TinyDevice, *, full_batch: bool = False) -> Times:
    """Replay the arrivals and return the seconds per row of a step.

    With `full_batch`, ticks from the last join on are left out: a batch that runs empty is no steady state.

    Raises:
        RuntimeError: a request was not answered.
    """
    outcome = replay(policy, arrivals, device)
    if len(outcome.latency_s) != len(arrivals):
        raise RuntimeError(f"{len(arrivals) - len(outcome.latency_s)} requests were not answered")
    ticks = list(zip(outcome.ticks, outcome.reports, strict=True))
    if full_batch:
        ticks = ticks[: max(number for number, tick in enumerate(outcome.ticks) if tick.join)]
    rows = sum(len(tick.advance or ()) - len(done.finished) for tick, done in ticks)
    return {"step_s": sum(done.seconds for _, done in ticks) / rows}
