# SPDX-License-Identifier: Apache-2.0
"""Real rank processes of the digits model behind a `RankExecutor`, in the test's own process and without a server.

The first start imports torch in the fork server. Later starts take a second, but spawned ones take as long as the first. Nothing of the
ranks is left afterwards.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing import util
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diffusion_worker.config import WorkerConfig
from diffusion_worker.messages import Fingerprint, RpcReply, SleepLevel, SleepTask, TaskAck, Tick, WakeTask
from diffusion_worker.ranks.executor import RankExecutor
from support.runner.rig import request
from support.worker.process import DIGITS_MODEL, process_exists

CALL_S = 60.0


@asynccontextmanager
async def ranks(*, asleep: bool = False, limit_s: float = 600, **settings: Any) -> AsyncIterator[RankExecutor]:
    """Start two ranks of the digits model, or as many as `settings` say; check afterwards that nothing of them is left."""
    config = WorkerConfig(**{"model": str(DIGITS_MODEL), "served_name": "digits", "ranks": 2, "tick_timeout_s": 60.0} | settings)
    # The first call makes the fork server's folder, which outlives the test.
    util.get_temp_dir()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        # In a separate folder any remaining sockets are known to be the test's own.
        patch.setattr(tempfile, "tempdir", folder)
        executor = RankExecutor(config)
        pids: list[int] = []
        try:
            async with asyncio.timeout(limit_s):
                await executor.start(asleep=asleep)
                pids = pids_of(executor)
                yield executor
                pids += pids_of(executor)
                # A killed process would leave its shared memory.
                assert not any(map(has_shared_memory, pids_of(executor)))
        finally:
            await executor.stop()
        assert [pid for pid in pids if process_exists(pid)] == []
        assert socket_folders(folder) == []


def has_shared_memory(pid: int) -> bool:
    """Return whether a process maps shared memory; False for one that has ended."""
    try:
        return "/dev/shm/" in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def socket_folders(place: str) -> list[Path]:
    return list(Path(place).glob("diffusion-worker-*"))


def pids_of(executor: RankExecutor) -> list[int]:
    return [document.pid for document in executor.documents() if document.pid is not None]


def results(replies: list[RpcReply]) -> list[Any]:
    """Return the decoded result of each rank; None for a rank that sent none."""
    return [msgspec.msgpack.decode(reply.result) if reply.result is not None else None for reply in replies]


async def call(executor: RankExecutor, method: str, kind: type[Any] | None = None, **arguments: Any) -> list[Any]:
    """Call a method on all ranks, and return the results decoded as a kind.

    Raises:
        AssertionError: a rank answered with an error.
    """
    replies = await executor.call(method, timeout_s=CALL_S, **arguments)
    assert [reply.error for reply in replies] == [None] * len(replies)
    return [msgspec.msgpack.decode(reply.result or b"", type=kind or Any) for reply in replies]


async def sleep(executor: RankExecutor, task_id: str = "sleep", level: SleepLevel = SleepLevel.HOST_MEMORY) -> list[TaskAck]:
    return await call(executor, "handle_sleep_task", TaskAck, task=SleepTask(task_id, level))


async def wake(executor: RankExecutor, task_id: str = "wake") -> list[TaskAck]:
    return await call(executor, "handle_wake_task", TaskAck, task=WakeTask(task_id))


async def fingerprints(executor: RankExecutor) -> list[Fingerprint]:
    return await call(executor, "fingerprint", Fingerprint, probe=True)


async def image(executor: RankExecutor) -> bytes:
    """Send five ticks, the first of them with the request `a`, and join its frame from all five reports, none of which may have
    failures. Return the raw bytes."""
    for number in range(5):
        executor.broadcast_tick(Tick(number + 1, [] if number else [request("a")]))
    frame = b""
    for _ in range(5):
        report = await executor.next_report(60)
        assert not report.done.failed
        frame += b"".join(bytes(found) for found in report.frames)
    return frame
