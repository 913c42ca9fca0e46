# SPDX-License-Identifier: Apache-2.0
"""Long-running programs: started apart from us, found again by pid and start time, ended for certain."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

GRACE_S = 5.0
# Most of them are Go programs, whose collector at its default took a seventh of an API server's start; this one takes 100 MB more.
GO_COLLECTS_AT_PERCENT = "400"


@dataclass(frozen=True)
class Process:
    """A process, our child or not, identified by its pid and start time. The pid alone could belong to another process by now."""

    name: str
    pid: int
    started_ticks: int

    def alive(self) -> bool:
        """Return whether the process still runs: its pid has the start time that was noted at the start. A child that ended is reaped."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        return _started_ticks(self.pid) == self.started_ticks

    def stop(self) -> None:
        """End the process by SIGTERM, and after five seconds by SIGKILL, and wait for its end. Do nothing if it has ended."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not self.alive():
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            ends = time.monotonic() + GRACE_S
            while self.alive() and time.monotonic() < ends:
                time.sleep(0.02)


def start(name: str, argv: Sequence[str | Path], *, log: Path, env: Mapping[str, str] | None = None, dies_with_us: bool = False) -> Process:
    """Start a program without input and return at once; its output is appended to `log`, and it stays when this process ends.

    `dies_with_us` makes the kernel kill it at the end of the calling thread instead. `env` replaces the environment, except for a default
    of GOGC.
    """
    words = [str(a) for a in argv]
    if dies_with_us:
        words = ["setpriv", "--pdeathsig", "KILL", *words]
    output = (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    actions = [*_not_inherited(), no_input, output, (os.POSIX_SPAWN_DUP2, 1, 2)]
    surroundings = {"GOGC": GO_COLLECTS_AT_PERCENT, **(os.environ if env is None else env)}
    pid = os.posix_spawnp(words[0], words, surroundings, file_actions=actions, setsid=True)
    return Process(name, pid, _started_ticks(pid) or 0)


def _not_inherited() -> list[tuple[int, int]]:
    """Return actions that close, in a started program, the descriptors that our parent left open to us, such as a lock or a pipe."""
    inherited = [int(entry.name) for entry in Path("/proc/self/fd").iterdir() if int(entry.name) > 2]
    return [(os.POSIX_SPAWN_CLOSE, fd) for fd in inherited if _inheritable(fd)]


def _inheritable(fd: int) -> bool:
    with contextlib.suppress(OSError):  # the one by which we listed them
        return os.get_inheritable(fd)
    return False


def save(processes: Sequence[Process], file: Path) -> None:
    """Write the list of processes to a file, over an older one, for a later run to `load`."""
    file.write_text(json.dumps([asdict(p) for p in processes]))


def load(file: Path) -> list[Process]:
    """Return the processes noted by an earlier run; none if there is no note, or an incomplete one."""
    try:
        return [Process(**entry) for entry in json.loads(file.read_text())]
    except (FileNotFoundError, ValueError, TypeError):
        return []


def _started_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
