# SPDX-License-Identifier: Apache-2.0
"""A rank process as its server sees it: a pid that cannot be mistaken for another's, its last message, and its end."""

import asyncio
import contextlib
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from diffusion_worker.engine.state.state_document import RankDocument, RankState
from diffusion_worker.main_thread import SIGNAL, SeenMainThread
from diffusion_worker.messages import Fatal, MemoryReport, ModelInfo

COLLECT_S = 2.0


class RankProcess:
    """The server's knowledge of a rank process; made when the process was started."""

    def __init__(self, number: int, process: BaseProcess, main_thread: SeenMainThread) -> None:
        assert process.pid is not None
        self.number = number
        self.main_thread = main_thread
        self.pid = process.pid
        self.state = RankState.STARTING
        self.memory = MemoryReport()
        self.loaded: tuple[int, int] = (0, 0)
        self.model: ModelInfo | None = None
        self.last_report: Fatal | None = None
        self.heard_at = time.monotonic()
        self.gone = asyncio.Event()
        self.dropped_frames = 0
        self._process = process
        try:
            self.pidfd: int | None = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self.pidfd = None  # it ended, and the fork server has collected it already

    def kill(self) -> None:
        """Send SIGKILL and do not wait; do nothing if the process has ended. The pid, which another process may have, is not used."""
        if self.pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def ask_for_stack(self) -> None:
        """Signal the process to write the stacks of its threads to its file. A process that is still starting is ended by the signal."""
        if self.pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, SIGNAL)

    @property
    def stopped(self) -> bool:
        """Return whether the kernel shows the process as stopped (state T in /proc). It is False for one that has ended."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
        except (OSError, IndexError):
            return False  # it ended meanwhile, which its pidfd reports

    def exit_text(self) -> str:
        """Return the end of a process in words, by its signal or exit code; only "died" if neither is known yet."""
        return _exit_text(self._process)

    def document(self) -> RankDocument:
        """Return this rank's pid, state and memory for status reports, with the seconds since its last message."""
        return RankDocument(self.number, self.pid, self.state, round(time.monotonic() - self.heard_at, 3), self.memory)

    async def close(self) -> None:
        """Close our file descriptors for a process that has ended, and wait up to `COLLECT_S` seconds for its exit to be collected."""
        self.main_thread.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        await collect(self._process)


async def collect(process: BaseProcess) -> str:
    """Wait up to `COLLECT_S` seconds until a process that ends is collected, give back its descriptors, and return its end in words."""
    # The fork server collects a rank a moment after its pidfd reports the end. Until then its descriptors stay open. A join in a thread
    # would not work at the end of an interpreter, when no thread can be started.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(COLLECT_S):
            await readable(process.sentinel)
    text = _exit_text(process)
    with contextlib.suppress(ValueError):
        process.close()
    return text


async def readable(descriptor: int) -> None:
    """Wait until a descriptor has something to read, or its other end is closed."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(descriptor)


def _exit_text(process: BaseProcess) -> str:
    process.join(timeout=0)
    code = process.exitcode
    if code is None:
        return "died"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"exited with code {code}"
