# SPDX-License-Identifier: Apache-2.0
"""What a tick took of a rank's device: the time of its denoiser calls and the most memory beside what was there before."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch


class TickMeter:
    """Measures one tick. On a GPU times come from events, so that only the end of the tick waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []
        self._before = 0
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    @contextlib.contextmanager
    def denoising(self) -> Iterator[None]:
        """Count the time of what runs inside."""
        if self._device is None:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started
            return
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def denoise_seconds(self) -> float:
        """Seconds of all denoiser calls; waits for the device."""
        if self._events:
            self._events[-1][1].synchronize()
        on_device_ms: float = sum(begin.elapsed_time(end) for begin, end in self._events)
        return self._seconds + on_device_ms / 1000

    def peak_bytes(self, weights_bytes: int) -> int:
        """The most memory of the device beside `weights_bytes`; 0 on a CPU, where it is not known."""
        if self._device is None:
            return 0
        return max(0, torch.cuda.max_memory_allocated(self._device) - weights_bytes)
