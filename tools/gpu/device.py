# SPDX-License-Identifier: Apache-2.0
"""The device itself, and how its memory and its time are read."""

from __future__ import annotations

import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .process import Run

LIBRARIES = ("torch", "transformers", "diffusers", "peft", "numpy", "triton")
GIGA = 1e9


def tell(run: Run) -> None:
    """Report the device and the versions of libraries, and compute a product on it.

    Raises:
        RuntimeError: torch has no such device; in torch's own words.
        AssertionError: the product is wrong.
    """
    run.note(f"{', '.join(f'{name} {_version(name)}' for name in LIBRARIES)}; {len(os.sched_getaffinity(0))} cores")
    if not run.on_gpu:
        run.note("device: the CPU; its figures say nothing of a GPU")
        return
    torch.cuda.init()  # type: ignore[no-untyped-call]
    found = torch.cuda.get_device_properties(0)
    run.note(f"device: {found.name}, {found.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}")
    run.figure("memory_gb", found.total_memory / GIGA)
    ones = torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16)
    run.require(float((ones @ ones).sum()) == 1024.0**3, "a product of ones computed on the device")


def synchronize(device: str) -> None:
    """Wait until the GPU has done all that it was given; do nothing for the CPU."""
    if device != "cpu":
        torch.cuda.synchronize()


def memory_bytes(device: str) -> int:
    """Return the memory in use: that of the whole GPU as its driver counts, or on a CPU the resident bytes of this process."""
    if device == "cpu":
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def seconds_of(call: Callable[[], Any], device: str, *, times: int) -> float:
    """Call once, then `times` times more, and return the median seconds of those; each is timed until the device is done."""
    call()
    return statistics.median(seconds_once(call, device) for _ in range(times))


def seconds_once(call: Callable[[], Any], device: str) -> float:
    """Call once, and return the seconds until the device is done."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not there"
