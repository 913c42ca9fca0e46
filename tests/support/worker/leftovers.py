# SPDX-License-Identifier: Apache-2.0
"""The memory, descriptors, processes, requests and folders that a worker should not have more of after much work than before.

Real: all of it, as /proc and the worker itself show it.
"""

import os
import time
from pathlib import Path

from support.worker.process import WorkerProcess, descendants, process_exists

# What a process may grow by after its first requests: arenas, caches of compiled patterns, log buffers.
GROWTH_BYTES = 96 * 2**20
GROWTH_DESCRIPTORS = 8
# The fork server has torch in its memory, and ends by itself when its server is gone: on a machine full of work that takes its time.
ENDED_WITHIN_S = 60.0

# Resident bytes and open descriptors by process.
Footprint = dict[int, tuple[int, int]]


def footprint(worker: WorkerProcess) -> Footprint:
    """Of every process of the worker."""
    pids = [worker.pid, *descendants(worker.pid)]
    return {pid: (_resident_bytes(pid), len(list(Path(f"/proc/{pid}/fd").iterdir()))) for pid in pids}


def left_over(worker: WorkerProcess, before: Footprint) -> list[str]:
    """Return the things that are there and were not there before, once the worker is idle."""
    worker.wait_for(lambda: worker.state()["state"] == "ready" and worker.state()["inFlight"] == 0, what="idle")
    state, after = worker.state(), footprint(worker)
    counts = {"queued": state["queued"], **{adapter["name"]: adapter["refs"] for adapter in state["adapters"]}}
    wrong = [f"{what}: {found} are left" for what, found in counts.items() if found]
    if len(after) != len(before):
        wrong.append(f"processes: {len(before)} before, {len(after)} after")
    for pid in before.keys() & after.keys():
        (resident, descriptors), (now, open_now) = before[pid], after[pid]
        if now - resident > GROWTH_BYTES:
            wrong.append(f"pid {pid} grew by {(now - resident) / 2**20:.0f} MiB")
        if open_now - descriptors > GROWTH_DESCRIPTORS:
            wrong.append(f"pid {pid} has {open_now - descriptors} descriptors more")
    return wrong


def left_at_end(worker: WorkerProcess, folder: Path) -> list[str]:
    """Ends the worker: it should end with 0, all its processes with it, and leave nothing in its temporary folder."""
    pids = [worker.pid, *descendants(worker.pid)]
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200] for pid in pids}
    code = worker.terminate()
    deadline = time.monotonic() + ENDED_WITHIN_S
    while (left := [pid for pid in pids if process_exists(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)  # the fork server ends when it notices
    # Not what torch keeps for itself there.
    folders = sorted(path.name for path in folder.iterdir() if path.name.startswith(("diffusion-worker", "pymp")))
    processes = [f"{pid} ({names[pid]})" for pid in left]
    return [f"end: exit code {code}, processes {processes}, folders {folders}"] if code or left or folders else []


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
