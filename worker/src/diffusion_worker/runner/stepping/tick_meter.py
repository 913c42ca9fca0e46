# SPDX-License-Identifier: Apache-2.0
"""A tick's costs on a rank's device: the time of its model calls and the peak memory above the level before."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch


class StageSpan:
    """The time from construction to `end`. On a GPU it is that of the work queued meanwhile, known once the GPU has done the work."""

    def __init__(self, device: torch.device | None) -> None:
        self._seconds = 0.0
        self._started_s = time.perf_counter()
        self._events: tuple[Any, Any] | None = None
        if device is not None:
            event: Any = torch.cuda.Event
            self._events = event(enable_timing=True), event(enable_timing=True, blocking=True)
            self._events[0].record()

    def end(self) -> None:
        """End the span, now that its work is done or queued on the device."""
        if self._events is None:
            self._seconds = time.perf_counter() - self._started_s
        else:
            self._events[1].record()

    @property
    def seconds(self) -> float:
        """The elapsed time. On a GPU the first reader, in whichever thread, blocks until the work before `end` is done."""
        if self._events is not None:
            begin, end = self._events
            end.synchronize()
            self._seconds, self._events = begin.elapsed_time(end) / 1000, None
        return self._seconds


class TickMeter:
    """Times and peak memory of one tick. On a GPU the calls are timed by events, so nothing blocks until a sum is read.

    The allocator's peak is reset when this is constructed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._denoising: list[StageSpan] = []
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    @contextlib.contextmanager
    def measuring(self, *, denoises: bool) -> Iterator[StageSpan]:
        """Measure the work done in this context, and count it as denoising if `denoises`. Work that fails is not counted."""
        span = StageSpan(self._device)
        yield span
        span.end()
        if denoises:
            self._denoising.append(span)

    def denoise_seconds(self) -> float:
        """Add up the time of this tick's denoiser calls, 0 without any; on a GPU this blocks until they are done."""
        return sum(span.seconds for span in self._denoising)

    def peak_bytes(self, weights_bytes: int) -> int:
        """Return by how much the allocator's peak in this tick exceeds `weights_bytes`, at least 0; on a CPU the peak is unknown and 0."""
        if self._device is None:
            return 0
        return max(0, torch.cuda.max_memory_allocated(self._device) - weights_bytes)
