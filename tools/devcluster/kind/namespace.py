# SPDX-License-Identifier: Apache-2.0
"""Pid, network and mount namespaces whose first process is `pause`: ending that one ends all that runs in them. And control groups."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from .. import processes
from ..checks import SYSTEM_PATH
from ..errors import CommandFailed


def first_process(mark: str) -> int | None:
    """Return the pid of the first process of the namespaces named `mark`, also if a killed run left it; None if there is none."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if words[0].endswith(b"pause") and words[1:2] == [mark.encode()]:
                    return int(entry.name)
    return None


def unshare(pause: Path, mark: str, *, log: Path, deadline_s: float = 10.0) -> int:
    """Run `pause` as pid 1 of new network, mount and pid namespaces; return its pid on the machine, by which others enter them.

    `mark` is its argument, by which it is found. If it does not appear within `deadline_s` seconds, CommandFailed quotes the log.
    """
    apart = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--propagation", "slave"]
    processes.start("init", [*apart, pause, mark], log=log)
    ends = time.monotonic() + deadline_s
    while (pid := first_process(mark)) is None:
        if time.monotonic() > ends:
            raise CommandFailed(f"the namespaces of {mark} did not come up: {log.read_text().strip() or 'no message'}")
        time.sleep(0.02)
    return pid


def entering(pid: int) -> list[str]:
    """Return the words to put before a command so that it runs with the network, mounts and pids of process `pid`."""
    return ["nsenter", "--target", str(pid), "--net", "--mount", "--pid", "--"]


def environment(*folders: Path) -> dict[str, str]:
    """Return PATH, with `folders` before the system's, and HOME, or /root if there is none; no other variable of the user leaks in."""
    return {"PATH": os.pathsep.join([*map(str, folders), SYSTEM_PATH]), "HOME": os.environ.get("HOME", "/root")}


def end_processes(mark: str, *, deadline_s: float = 20.0) -> None:
    """Signal the first process of the namespaces named `mark` until it is gone, with SIGKILL in the second half of the deadline.

    It is pid 1 of its namespace, so the kernel ends every other process there. A survivor at the deadline raises CommandFailed.
    """
    ends = time.monotonic() + deadline_s
    number = signal.SIGTERM
    while (pid := first_process(mark)) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if time.monotonic() > ends:
            raise CommandFailed(f"the first process {pid} of {mark} does not end")
        time.sleep(0.1)
        number = signal.SIGKILL if ends - time.monotonic() < deadline_s / 2 else signal.SIGTERM


def cgroups_named(name: str, root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    return [p for p in (root / name, *root.glob(f"*/{name}")) if p.is_dir()]


def remove_cgroups(look: Callable[[], list[Path]], ends: float) -> None:
    """Delete groups until `look` returns none; raise CommandFailed for those that are still busy at `ends`, a time of `time.monotonic`."""
    while left := look():
        for tree in left:
            _remove_tree(tree)
        if time.monotonic() > ends:
            raise CommandFailed(f"cgroups with processes in them are left; is another kubelet running here? {[str(p) for p in left]}")
        time.sleep(0.05)


def _remove_tree(tree: Path) -> None:
    for folder, _, _ in os.walk(tree, topdown=False):
        with contextlib.suppress(OSError):  # still busy: the next round
            Path(folder).rmdir()
