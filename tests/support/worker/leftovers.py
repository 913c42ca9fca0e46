# SPDX-License-Identifier: Apache-2.0
"""Leaks of a worker: memory, descriptors, processes, requests and folders that it has more of after much work than before.

Real: all of it, as the kernel and the worker itself show it.
"""

import time
from pathlib import Path

import psutil

from support.worker.process import WorkerProcess, process_exists

# The allowed growth of a process after its first requests: arenas, caches of compiled patterns, log buffers.
GROWTH_BYTES = 96 * 2**20
GROWTH_DESCRIPTORS = 8
# The fork server has torch in its memory, and ends by itself after its server: on a busy machine that takes long.
ENDED_WITHIN_S = 60.0

# Resident bytes and open descriptors by process.
Footprint = dict[int, tuple[int, int]]


def footprint(worker: WorkerProcess) -> Footprint:
    """Return resident bytes and open file descriptors of the server and its descendants, by pid."""
    return {process.pid: (process.memory_info().rss, process.num_fds()) for process in _processes(worker)}


def left_over(worker: WorkerProcess, before: Footprint) -> list[str]:
    """Wait until the worker is ready and idle, and list the leaks since `before`: waiting requests, references to adapters, processes,
    memory and descriptors."""
    worker.wait_for(lambda: worker.state()["state"] == "ready" and worker.state()["inFlight"] == 0, what="idle")
    state, after = worker.state(), footprint(worker)
    counts = {"queued": state["queued"], **{adapter["name"]: adapter["refs"] for adapter in state["adapters"]}}
    wrong = [f"{what}: {found} are left" for what, found in counts.items() if found]
    # A decoder's last child may still have been there before.
    if len(after) > len(before):
        wrong.append(f"processes: {len(before)} before, {len(after)} after")
    for pid in before.keys() & after.keys():
        (resident, descriptors), (now, open_now) = before[pid], after[pid]
        if now - resident > GROWTH_BYTES:
            wrong.append(f"pid {pid} grew by {(now - resident) / 2**20:.0f} MiB")
        if open_now - descriptors > GROWTH_DESCRIPTORS:
            wrong.append(f"pid {pid} has {open_now - descriptors} descriptors more")
    return wrong


def left_at_end(worker: WorkerProcess, folder: Path) -> list[str]:
    """End the worker, and return one line if anything is wrong, otherwise nothing. Wrong are an exit code other than 0, processes that
    remain, and the worker's own entries in `folder`."""
    names = {process.pid: process.as_dict(["cmdline"])["cmdline"] for process in _processes(worker)}
    code = worker.terminate()
    deadline = time.monotonic() + ENDED_WITHIN_S
    while (left := [pid for pid in names if process_exists(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)  # the fork server ends when it notices
    # Torch's own files in the folder are ignored.
    folders = sorted(path.name for path in folder.iterdir() if path.name.startswith(("diffusion-worker", "pymp")))
    processes = [f"{pid} ({names[pid]})" for pid in left]
    return [f"end: exit code {code}, processes {processes}, folders {folders}"] if code or left or folders else []


def _processes(worker: WorkerProcess) -> list[psutil.Process]:
    server = psutil.Process(worker.pid)
    return [server, *server.children(recursive=True)]
