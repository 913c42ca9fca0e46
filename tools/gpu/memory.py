# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake on SD3.5-medium: memory as the device's driver says it, and a wake against a copy from pinned memory."""

from __future__ import annotations

import time

import numpy as np
import torch

from diffusion_worker.memory.heap import give_back_heap

from .device import GIGA, memory_bytes, seconds_of, synchronize
from .process import Run
from .steps import image, load_named

CHUNK_BYTES = 1 << 30
MOST_LEVELS = 2


def sleep(run: Run) -> None:
    """Make an image, sleep, wake, and make it again; report the times and the memory.

    Raises:
        AssertionError: the second image differs from the first by more than 2 of 255 levels.
    """
    loaded = load_named(run, "sd3")
    runner = loaded.runner
    before = image(loaded, "before", steps=2)
    weights = runner.memory().weights_bytes
    # Memory that the allocator keeps of the image would count as freed.
    give_back_heap(torch.device(run.device))
    awake = memory_bytes(run.device)
    began = time.perf_counter()
    # A worker that may sleep makes the mirror at its load.
    if runner.weights.has_mirrors:
        runner.weights.make_mirrors()
        synchronize(run.device)
        run.figure("mirror_s", time.perf_counter() - began)
        began = time.perf_counter()
    runner.release()
    synchronize(run.device)
    run.figure("sleep_ms", (time.perf_counter() - began) * 1000, "<= 50")
    asleep = memory_bytes(run.device)
    began = time.perf_counter()
    runner.restore()
    synchronize(run.device)
    wake_s = run.figure("wake_s", time.perf_counter() - began)
    again = memory_bytes(run.device)
    run.figure("weights_gb", weights / GIGA)
    for name, value in (("awake_gb", awake), ("asleep_gb", asleep), ("awake_again_gb", again)):
        run.figure(name, value / GIGA)
    run.figure("freed_fraction", (awake - asleep) / weights, ">= 0.98")
    run.figure("wake_vs_copy", weights / _copied_per_s(run, weights) / wake_s, ">= 0.95")
    apart = int(np.abs(before.astype(np.int16) - image(loaded, "after", steps=2).astype(np.int16)).max())
    run.figure("levels_apart", apart)
    run.require(apart <= MOST_LEVELS, f"the same image after the wake, found {apart} levels between them")


def _copied_per_s(run: Run, weights: int) -> float:
    """Return the bytes a second of copies from pinned memory to the device, in chunks as large as those of a mirror."""
    size = min(CHUNK_BYTES, weights)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=run.on_gpu).fill_(1)
    there = torch.empty(size, dtype=torch.uint8, device=run.device)
    return size / seconds_of(lambda: there.copy_(host, non_blocking=True), run.device, times=9)
