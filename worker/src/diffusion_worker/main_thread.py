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
    """A rank's report on its main thread: passed points, and at each SIGNAL the stacks, in two files that the server has made.

    Each process has a single object, `OWN`. Before `show` nothing is counted or written.
    """

    def __init__(self) -> None:
        self._count = 0
        self._memory: mmap.mmap | None = None

    def show(self, folder: Path, rank: int) -> None:
        """Open this rank's two files in `folder`, which must exist.

        From now on `passed` writes into one of them, and at each SIGNAL the stacks of all threads are appended to the other.
        """
        with _points(folder, rank).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), POINTS.size)
        # The descriptor stays open as long as the process.
        faulthandler.register(SIGNAL, file=os.open(_stack(folder, rank), os.O_WRONLY | os.O_APPEND), all_threads=True)

    def passed(self) -> None:
        """Count a point, and write number and time to the file: this rank has done its part, and may now wait for other ranks.

        Do nothing before `show`.
        """
        if self._memory is not None:
            self._count += 1
            POINTS.pack_into(self._memory, 0, self._count, time.monotonic())


OWN = OwnMainThread()


class SeenMainThread:
    """The server's view of one rank's main thread. The constructor makes the rank's two files, so call it before the rank starts."""

    def __init__(self, folder: Path, rank: int) -> None:
        _points(folder, rank).write_bytes(bytes(POINTS.size))
        with _points(folder, rank).open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), POINTS.size, access=mmap.ACCESS_READ)
        self._stack: int | None = os.open(_stack(folder, rank), os.O_CREAT | os.O_RDONLY, 0o600)

    @property
    def passed(self) -> Passed:
        """The number of points that the rank has passed, and the time of the last one; both 0 before the first. Fails after `close`."""
        return Passed(*POINTS.unpack_from(self._memory))

    def stack(self) -> str:
        """Return what the rank has written on SIGNAL so far, the first MiB of it: each time the stacks of all its threads.

        Empty before the first signal and after `close`. This sends no signal.
        """
        if self._stack is None:
            return ""
        return os.pread(self._stack, 1 << 20, 0).decode(errors="replace")

    def close(self) -> None:
        """Close the mapping and the descriptor, but keep the files; a second call does nothing."""
        self._memory.close()
        if self._stack is not None:
            os.close(self._stack)
            self._stack = None


def stage_of(stack: str) -> str | None:
    """Return where the main thread is in the last dump of `stack`, as `wait (queue.py:5), called by step (runner.py:9)`.

    The first is its innermost frame, the second the innermost frame of this package, left out if it is the same or there is none.
    None if the dump has no frame.
    """
    # The oldest thread comes last.
    frames = [(Path(path), line, name) for path, line, name in _FRAME.findall(stack.strip().rpartition("\n\n")[2])]
    if not frames:
        return None
    ours = next((frame for frame in frames if "diffusion_worker" in frame[0].parts), frames[0])
    inner, caller = (f"{name} ({path.name}:{line})" for path, line, name in (frames[0], ours))
    return inner if ours == frames[0] else f"{inner}, called by {caller}"


def _points(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.points"


def _stack(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.stack"
