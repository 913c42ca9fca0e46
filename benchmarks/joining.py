# SPDX-License-Identifier: Apache-2.0
"""P8: requests that join and leave at any step, against the best static batch; and against one by one where batching cannot help.

`vs_static_batch`: images of 32 pixels, whose steps are bound by launches. A static batch of N starts N requests at once and ends
them together; the best N of 1 to 16 is what the scheduler is held against, with a queue of requests of other lengths that is
never empty, once it has seen what steps of that size cost.
`vs_serial_saturated`: images of 192 pixels, whose steps are bound by arithmetic, all there from the start, against one at a time.
Both count rows of steps per second that the thread computed, on the real runner. Decoding is left out of the first: requests that end
at different steps decode alone, which is dear for a decoder that is bound by launches, as the tiny model's is, and should be
nothing for one that is bound by arithmetic (not measured). `vs_static_batch_decoded` is the same with it, for the record.

What a machine with two cores cannot show: the same on a GPU, where launches cost more and the batch that pays is larger.
"""

import itertools
import random
import statistics

from benchmarks.fifo import FifoScheduler
from benchmarks.replay import Arrival, Policy, replay
from benchmarks.result import Measured
from benchmarks.tiny_dit import TinyDevice, request
from diffusion_worker.engine.scheduler import StepScheduler

SMALL_SIDE, LARGE_SIDE = 32, 192
# Of 12 on average, for the static batch exactly.
STEPS = 12
LENGTHS = (6, 8, 10, 12, 14, 16, 18)
BATCHES = (1, 2, 4, 8, 16)
REQUESTS = 160
LARGE_REQUESTS = 8
ROUNDS = 3
TOLERANCE = 0.10


def measure() -> Measured:
    """Steps per second of ours over those of the best static batch, and over those of one request after another."""
    device = TinyDevice()
    for side, batch in itertools.product((SMALL_SIDE, LARGE_SIDE), (1, 2)):
        device.run_together([request(f"warm-{n}", side=side, steps=3) for n in range(batch)])
    samples = [_round(device, number) for number in range(ROUNDS)]
    _require_rest([sample["static_rate"] for sample in samples])
    _require_rest([sample["serial_rate"] for sample in samples])
    return Measured(
        results={
            name: round(statistics.median(sample[name] for sample in samples), 3)
            for name in ("vs_static_batch", "vs_serial_saturated", "vs_static_batch_decoded", "best_batch", "batch_gain")
        },
        targets={"vs_static_batch": ">= 0.95", "vs_serial_saturated": ">= 0.98"},
        samples=samples,
    )


def _round(device: TinyDevice, number: int) -> dict[str, float]:
    learned = StepScheduler(max(BATCHES))
    _rate(learned, _joining(ROUNDS + number)[: REQUESTS // 2], device)
    device.decodes = False
    static = {batch: _static_rate(device, batch) for batch in BATCHES}
    best = max(static, key=lambda batch: static[batch])
    ours = _rate(learned, _joining(number), device, full_batch=True)
    device.decodes = True
    decoded = _rate(learned, _joining(number), device, full_batch=True) / _static_rate(device, best)
    waiting = [Arrival(0.0, request(f"{n}", side=LARGE_SIDE, steps=STEPS, seed=n)) for n in range(LARGE_REQUESTS)]
    serial = _rate(FifoScheduler(), waiting, device)
    saturated = _rate(StepScheduler(max(BATCHES)), waiting, device)
    return {
        "vs_static_batch": ours / static[best],
        "vs_serial_saturated": saturated / serial,
        "vs_static_batch_decoded": decoded,
        "best_batch": float(best),
        "batch_gain": static[best] / static[1],
        "static_rate": static[best],
        "serial_rate": serial,
    }


def _static_rate(device: TinyDevice, batch: int) -> float:
    """Rows of steps per second of full batches that start and end together, from about as many requests as ours has."""
    groups = max(1, REQUESTS // 2 // batch)
    seconds = 0.0
    for group in range(groups):
        specs = [request(f"{group}-{n}", side=SMALL_SIDE, steps=STEPS, seed=n) for n in range(batch)]
        seconds += sum(done.seconds for done in device.run_together(specs))
    return groups * batch * STEPS / seconds


def _joining(seed: int) -> list[Arrival]:
    """Requests of other lengths, all waiting: as one leaves, another joins in the middle of the others."""
    rng = random.Random(seed)
    lengths = [LENGTHS[n % len(LENGTHS)] for n in range(REQUESTS)]
    rng.shuffle(lengths)
    return [Arrival(0.0, request(f"{n}", side=SMALL_SIDE, steps=steps, seed=n)) for n, steps in enumerate(lengths)]


def _rate(policy: Policy, arrivals: list[Arrival], device: TinyDevice, *, full_batch: bool = False) -> float:
    """Rows of steps per second; with `full_batch` while anybody waits: how a batch runs empty at the end belongs to no steady state."""
    outcome = replay(policy, arrivals, device)
    if len(outcome.latency_s) != len(arrivals):
        raise RuntimeError(f"{len(arrivals) - len(outcome.latency_s)} requests were not answered")
    pairs = list(zip(outcome.ticks, outcome.reports, strict=True))
    if full_batch:
        pairs = pairs[: max(number for number, tick in enumerate(outcome.ticks) if tick.join)]
    rows = sum(len(tick.advance or ()) - len(done.finished) for tick, done in pairs)
    return rows / sum(done.seconds for _, done in pairs)


def _require_rest(rates: list[float]) -> None:
    if max(rates) > min(rates) * (1 + TOLERANCE):
        shown = ", ".join(f"{rate:.1f}" for rate in rates)
        raise RuntimeError(f"rounds of the baseline ran at {shown} steps a second: the machine is not at rest")
