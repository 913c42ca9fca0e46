# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake on SD3.5-medium: memory as the device's driver says it, and a wake against a copy from pinned memory."""

from __future__ import annotations

import statistics

import numpy as np
import torch

from diffusion_worker.memory.heap import give_back_heap
from diffusion_worker.memory.weights import ModelWeights

from .device import GIGA, memory_bytes, seconds_of, seconds_once
from .process import Run
from .steps import image, load_named

TIMES = 3
MOST_LEVELS = 2


def sleep(run: Run) -> None:
    """Make an image, sleep and wake some times, and make it again; report the times and the memory.

    Raises:
        AssertionError: the second image differs from the first by more than 2 of 255 levels.
    """
    loaded = load_named(run, "sd3")
    runner = loaded.runner
    before = image(loaded, "before", steps=2)
    weights = runner.memory().weights_bytes
    # Memory that the allocator keeps of the image would count as freed.
    give_back_heap(torch.device(run.device))
    if runner.weights.has_mirrors:
        # A worker that may sleep makes the mirror at its load.
        run.figure("mirror_s", seconds_once(runner.weights.make_mirrors, run.device))
    awake = memory_bytes(run.device)
    sleeps, wakes = [], []
    for _ in range(TIMES):
        sleeps.append(seconds_once(runner.release, run.device))
        asleep = memory_bytes(run.device)
        wakes.append(seconds_once(runner.restore, run.device))
    again = memory_bytes(run.device)
    run.figure("sleep_ms", statistics.median(sleeps) * 1000, "<= 50")
    run.figure("wake_s", statistics.median(wakes))
    for name, value in (("awake_gb", awake), ("asleep_gb", asleep), ("awake_again_gb", again)):
        run.figure(name, value / GIGA)
    run.figure("freed_fraction", (awake - asleep) / weights, ">= 0.98")
    run.figure("wake_vs_copy", _copy_s(run, runner.weights, weights) / statistics.median(wakes), ">= 0.95")
    apart = int(np.abs(before.astype(np.int16) - image(loaded, "after", steps=2).astype(np.int16)).max())
    run.figure("levels_apart", apart)
    run.require(apart <= MOST_LEVELS, f"the same image after the wake, found {apart} levels between them")


def _copy_s(run: Run, weights: ModelWeights, size: int) -> float:
    """Return the seconds of a wake's copies alone, from the same pinned memory to memory that is there already.

    On a CPU, which has no mirrors, it is the copy of as many bytes.
    """
    if weights.has_mirrors:
        pairs = [(component.mirror, component.slab.bytes) for component in weights._components]

        def copy() -> None:
            for mirror, slab in pairs:
                assert mirror is not None
                mirror.give(slab)

        return seconds_of(copy, run.device, times=TIMES)
    here, there = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    return seconds_of(lambda: there.copy_(here), run.device, times=TIMES)
