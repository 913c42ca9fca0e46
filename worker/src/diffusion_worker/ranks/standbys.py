# SPDX-License-Identifier: Apache-2.0
"""Standby processes: spawned and past their imports, so that a lost group of spawned ranks is back without the time of its imports.

They allocate nothing on a GPU. Their death is nobody's loss: after a pause another is made.
"""

import asyncio
import contextlib
import logging
import os

from diffusion_worker.config import StartMethod, WorkerConfig
from diffusion_worker.memory.host_memory import available_host_bytes
from diffusion_worker.ranks.launch import NewProcess
from diffusion_worker.ranks.rank_main import IMPORTED
from diffusion_worker.ranks.rank_process import COLLECT_S, collect, readable
from diffusion_worker.ranks.start_method import accelerator_expected, start_method_of

log = logging.getLogger(__name__)

# Memory of a process after its imports, beside the pages of files that it shares with the ranks: 0.53 GB with torch 2.11 for CPUs.
STANDBY_BYTES = 600_000_000
# A standby that cannot live, as its memory or an import is missing, costs one start in this time.
PAUSE_S = 60.0


def wanted_standbys(config: WorkerConfig) -> int:
    """Return the number of standbys to keep: by default one a rank on an accelerator, and none on a CPU.

    It is 0 where ranks come from the fork server, which has the imports already.
    """
    if start_method_of(config) is not StartMethod.SPAWN:
        return 0
    if config.standby_ranks is not None:
        return config.standby_ranks
    return config.ranks if accelerator_expected(config) else 0


class Standbys:
    """The standbys of a worker, each kept by a task of its own. Use it on the server's event loop."""

    def __init__(self, config: WorkerConfig) -> None:
        self._wanted = wanted_standbys(config)
        if (config.standby_ranks or 0) > self._wanted:
            log.warning("--standby-ranks %d: none are kept, as ranks are forked from a process that has all imports", config.standby_ranks)
        self._tasks: set[asyncio.Task[None]] = set()
        self._processes: set[NewProcess] = set()
        self._ready: dict[NewProcess, asyncio.Task[None]] = {}
        self._ended = False

    @property
    def ready(self) -> int:
        """Number of standbys that are past their imports."""
        return len(self._ready)

    def keep(self) -> None:
        """Start making the missing standbys in the background. Make none if memory does not suffice for all, or after `kill`."""
        missing = 0 if self._ended else self._wanted - len(self._tasks)
        # Those that import take their memory in the next seconds.
        if missing <= 0 or not _fits(missing + len(self._processes) - len(self._ready)):
            return
        for _ in range(missing):
            task = asyncio.create_task(self._keep_one())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def take(self) -> list[NewProcess]:
        """Hand over all standbys that are past their imports, possibly none; the others stay, and none is replaced before `keep`.

        The caller gives each of them orders, or closes its connection, which ends it.
        """
        taken, self._ready = self._ready, {}
        self._processes -= taken.keys()
        for task in taken.values():
            task.cancel()
        await asyncio.gather(*taken.values(), return_exceptions=True)
        return list(taken)

    def kill(self) -> None:
        """Kill all standbys without waiting for their end, and make no more."""
        self._ended = True
        for standby in self._processes:
            standby.process.kill()
        for task in self._tasks:
            task.cancel()

    async def end(self) -> None:
        """Kill all standbys, wait until they are gone, and make no more."""
        self.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_one(self) -> None:
        """Have one standby, and another after a pause when it dies; end where memory does not suffice for another."""
        while True:
            try:
                end = await self._live_one()
            except OSError as error:
                end = f"cannot be started: {error}"
            log.warning("a standby rank %s; another is started in %g s", end, PAUSE_S)
            await asyncio.sleep(PAUSE_S)
            if not _fits(1):
                return

    async def _live_one(self) -> str:
        """Start a standby and wait for its end, which is returned in words. When cancelled, kill it, unless it was taken."""
        starting = asyncio.ensure_future(asyncio.to_thread(NewProcess, StartMethod.SPAWN, "standby", standby=True))
        try:
            standby = await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                await _close(await starting)
            raise
        self._processes.add(standby)
        try:
            if await _message(standby) == IMPORTED:
                task = asyncio.current_task()
                assert task is not None
                self._ready[standby] = task
                await _message(standby)
        finally:
            # Those that are taken are no longer in it.
            if standby in self._processes:
                self._processes.discard(standby)
                self._ready.pop(standby, None)
                end = await _close(standby)
        return end


def _fits(count: int) -> bool:
    """Return whether memory suffices for so many standbys; log a warning if not."""
    needed, available = count * STANDBY_BYTES, available_host_bytes()
    if needed > available:
        log.warning(
            "too little host memory: expected %d MB free for %d standby ranks, found %d MB; so a lost rank is replaced more slowly",
            needed // 1_000_000,
            count,
            available // 1_000_000,
        )
    return needed <= available


async def _message(standby: NewProcess) -> bytes | None:
    """Wait for the next message of a standby and return it; None when it has died."""
    await readable(standby.orders.fileno())
    try:
        return standby.orders.recv_bytes()
    except (EOFError, OSError):
        return None


async def _close(standby: NewProcess) -> str:
    """Kill a standby if it lives, wait until it is gone, and return its end in words."""
    process = standby.process
    process.kill()
    standby.orders.close()
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError, TimeoutError):  # it is collected already, or the kernel holds it
        pidfd = os.pidfd_open(process.pid)
        try:
            async with asyncio.timeout(COLLECT_S):
                await readable(pidfd)
        finally:
            os.close(pidfd)
    return await collect(process)
