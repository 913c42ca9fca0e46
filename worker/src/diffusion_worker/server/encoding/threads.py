# SPDX-License-Identifier: Apache-2.0
"""Threads for the slow work on images, which keep it off the event loop: few, and of lower priority than the loop.

Without a bound, twenty large images would occupy twenty threads. These would take the cores and the GIL from the loop, which
every request waits for. Further work waits in order.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from diffusion_worker.config import usable_cores
from diffusion_worker.engine.state.histogram import Durations

# Half of the cores are left to the loop and to ranks on CPUs. Four encode 300 images of 1024x1024 a second.
MAX_THREADS = 4
# Added niceness, which Linux has for each thread. Ten is a tenth of the weight of the loop and the ranks, which go first.
NICENESS = 10

P = ParamSpec("P")
T = TypeVar("T")


class EncodingThreads:
    """A pool for work on images, at a lower priority than the event loop.

    Without `threads` it has one for every two usable cores, at least 1 and at most `MAX_THREADS`.
    `pending` counts work that waits or runs; `waited` and `worked` measure it.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or max(1, min(MAX_THREADS, usable_cores() // 2))
        self.pending = 0
        self.waited, self.worked = Durations(), Durations()
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="encoding", initializer=_go_behind)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in a thread, and return its result or raise its error. Cancelled before its turn, it never runs."""
        times = [time.monotonic()]

        def work() -> T:
            times.append(time.monotonic())
            try:
                return function(*args, **kwargs)
            finally:
                times.append(time.monotonic())

        self.pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self.pending -= 1
            if len(times) == 3:
                self.waited.observe(times[1] - times[0])
                self.worked.observe(times[2] - times[1])


def _go_behind() -> None:
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS))
