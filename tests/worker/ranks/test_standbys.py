# SPDX-License-Identifier: Apache-2.0
"""Standby processes: they become ranks, die without a loss, and leave nothing.

A spawned process imports torch for itself, some seconds each, so there are few of them here.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from diffusion_worker.config import Device, StartMethod, WorkerConfig
from diffusion_worker.memory import host_memory
from diffusion_worker.ranks import standbys
from diffusion_worker.ranks.executor import RankExecutor
from diffusion_worker.ranks.launch import NewProcess
from diffusion_worker.ranks.rank_main import IMPORTED
from diffusion_worker.ranks.standbys import STANDBY_BYTES, Standbys, wanted_standbys
from support.worker.extensions import write_limit
from support.worker.process import process_exists
from support.worker.real_ranks import image, pids_of, ranks

DEADLINE_S = 240.0


def config(**settings: object) -> WorkerConfig:
    return WorkerConfig(**{"model": "m", "served_name": "m", "start_method": StartMethod.SPAWN, "standby_ranks": 1} | settings)  # type: ignore[arg-type]


def policies(pid: int) -> list[int]:
    """Return the kernel's scheduling policies of a process's threads, that of the main thread first.

    Threads that end meanwhile are left out.
    """
    threads = sorted((int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()), key=lambda thread: thread != pid)
    found = []
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):
            found.append(os.sched_getscheduler(thread))
    return found


def spare_pids() -> list[int]:
    """Return the pids of this process's living children that were started as standbys."""
    return [process.pid for process in multiprocessing.active_children() if process.name.endswith("standby") and process.pid]


async def until(check: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not check():
        assert time.monotonic() < deadline, f"not {what} within {DEADLINE_S:g} s"
        await asyncio.sleep(0.02)


async def one_ready(executor: RankExecutor) -> int:
    await until(lambda: executor.standbys == 1, "a standby past its imports")
    (pid,) = spare_pids()
    return pid


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_standby_that_is_killed_is_made_again_and_becomes_the_rank_that_is_killed_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standbys, "PAUSE_S", 0.01)
    settings = {"start_method": StartMethod.SPAWN, "standby_ranks": 1, "ranks": 1}
    async with ranks(limit_s=2 * DEADLINE_S, **settings) as executor:
        before = await image(executor)
        assert spare_pids() == []  # none is made before the group serves
        executor.keep_standbys()
        first = await one_ready(executor)
        os.kill(first, signal.SIGKILL)
        await until(lambda: executor.standbys == 0, "rid of the killed standby")
        second = await one_ready(executor)
        assert second != first and executor.loss is None and executor.generation == 1
        (rank,) = pids_of(executor)
        os.kill(rank, signal.SIGKILL)
        await executor.failed()
        await executor.restart()
        assert (pids_of(executor), executor.standbys, executor.generation) == ([second], 0, 2)
        assert await image(executor) == before
        assert policies(second)[0] == os.sched_getscheduler(0)
        assert set(policies(second)) <= {os.SCHED_OTHER, os.SCHED_BATCH}
        executor.keep_standbys()
        await until(lambda: len(spare_pids()) == 2, "a standby beside the former one")
        (third,) = set(spare_pids()) - {second}
        executor.end_standbys()
        await until(lambda: not process_exists(third), "an end of a standby that imports")
    assert spare_pids() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_standby_lives_although_an_import_leaves_a_thread_and_ends_with_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "threaded.py").write_text("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DIFFUSION_INTERNAL_PRELOAD", "threaded:Nothing")
    standby = await asyncio.to_thread(NewProcess, StartMethod.SPAWN, "standby", standby=True)
    pid = standby.process.pid
    assert pid is not None
    await until(lambda: os.SCHED_BATCH in policies(pid), "a thread that imports")
    assert await asyncio.to_thread(standby.orders.recv_bytes) == IMPORTED
    assert policies(pid)[0] == os.sched_getscheduler(0) and os.SCHED_BATCH in policies(pid)
    standby.orders.close()
    await asyncio.to_thread(standby.process.join, DEADLINE_S)
    assert standby.process.exitcode == 0


def test_standbys_are_as_many_as_ranks_on_an_accelerator_and_none_on_a_cpu_unless_asked_for() -> None:
    assert wanted_standbys(config(device=Device.CUDA, ranks=3, standby_ranks=None)) == 3
    assert wanted_standbys(config(device=Device.CPU, ranks=3, standby_ranks=None)) == 0
    assert wanted_standbys(config(device=Device.CPU, ranks=3, standby_ranks=2)) == 2
    assert wanted_standbys(config(device=Device.CUDA, ranks=3, standby_ranks=0)) == 0
    assert wanted_standbys(config(device=Device.CPU, start_method=StartMethod.AUTO, standby_ranks=2)) == 0


@pytest.mark.parametrize(("free_bytes", "made"), [(2 * STANDBY_BYTES, 2), (2 * STANDBY_BYTES - 1, 0)])
async def test_standbys_that_do_not_all_fit_below_the_limit_of_memory_are_not_made(
    free_bytes: int, made: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_limit(tmp_path, free_bytes=free_bytes)
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    spares = Standbys(config(standby_ranks=2))
    with caplog.at_level(logging.WARNING):
        spares.keep()
    await until(lambda: len(spare_pids()) == made, "as many standbys as fit")
    assert ("too little host memory: expected 1200 MB free for 2 standby ranks, found 1199 MB" in caplog.text) is (made == 0)
    pids = spare_pids()
    await spares.end()
    assert not any(map(process_exists, pids)) and spare_pids() == []
    spares.keep()
    assert spare_pids() == []  # it has ended
