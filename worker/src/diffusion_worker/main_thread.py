# SPDX-License-Identifier: Apache-2.0
"""Signs of a rank's main thread for its server: the number of points that it has passed, and its stack when the server asks.

Both are files that the server made and holds open. A hanging rank cannot answer, but its memory can be read. Faulthandler writes the stack
in the handler of a signal, which needs no GIL. Every rank passes the same points in the same order, where they wait for each other. So of
ranks that hang together, the one with the fewest holds the others up.
"""

import faulthandler
import mmap
import os
import re
import signal
import struct
import time
from pathlib import Path
from typing import NamedTuple

POINTS = struct.Struct("=Qd")
SIGNAL = signal.SIGUSR2
_FRAME = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')


class Passed(NamedTuple):
    """The number of points that a main thread has passed, and the time of the last one, in monotonic seconds."""

    points: int
    at_s: float


class OwnMainThread:
    """The rank's end, of which each process has one. It does nothing before `show`."""

    def __init__(self) -> None:
        self._count = 0
        self._memory: mmap.mmap | None = None

    def show(self, folder: Path, rank: int) -> None:
        """Write into the files of this rank from now on."""
        with _points(folder, rank).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), POINTS.size)
        # The descriptor stays open as long as the process.
        faulthandler.register(SIGNAL, file=os.open(_stack(folder, rank), os.O_WRONLY | os.O_APPEND), all_threads=True)

    def passed(self) -> None:
        """Count a point: this rank has done its part, and may now wait for the others."""
        if self._memory is not None:
            self._count += 1
            POINTS.pack_into(self._memory, 0, self._count, time.monotonic())


OWN = OwnMainThread()


class SeenMainThread:
    """The server's end, for one rank. Make it before the rank starts."""

    def __init__(self, folder: Path, rank: int) -> None:
        _points(folder, rank).write_bytes(bytes(POINTS.size))
        with _points(folder, rank).open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), POINTS.size, access=mmap.ACCESS_READ)
        self._stack: int | None = os.open(_stack(folder, rank), os.O_CREAT | os.O_RDONLY, 0o600)

    @property
    def passed(self) -> Passed:
        """Return the points that the rank has passed."""
        return Passed(*POINTS.unpack_from(self._memory))

    def stack(self) -> str:
        """Return the stacks of all its threads, which it wrote when it was asked; empty before."""
        if self._stack is None:
            return ""
        return os.pread(self._stack, 1 << 20, 0).decode(errors="replace")

    def close(self) -> None:
        """Give back the descriptors and the memory."""
        self._memory.close()
        if self._stack is not None:
            os.close(self._stack)
            self._stack = None


def stage_of(stack: str) -> str | None:
    """Return the place of the main thread in a dump of all threads: its innermost frame, and the innermost of this package."""
    # The oldest thread comes last.
    frames = [(Path(path), line, name) for path, line, name in _FRAME.findall(stack.strip().rpartition("\n\n")[2])]
    if not frames:
        return None
    ours = next((frame for frame in frames if "diffusion_worker" in frame[0].parts), frames[0])
    places = [f"{name} ({path.name}:{line})" for path, line, name in dict.fromkeys((frames[0], ours))]
    return ", called by ".join(places)


def _points(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.points"


def _stack(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.stack"
