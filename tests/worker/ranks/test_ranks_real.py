# SPDX-License-Identifier: Apache-2.0
"""Real rank processes behind `RankExecutor`, in this process and without a server: calls, faults, ends, and cleanup.

The first start imports torch in the fork server; later ones take a second, so all share it.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import ConfigError, ErrorCode, Fault, GroupFailed, LoadTimeout, RequestError
from diffusion_worker.messages import Tick
from diffusion_worker.ranks.executor import RankExecutor
from support.runner.rig import request
from support.worker.process import DIGITS_MODEL, process_exists
from support.worker.real_ranks import image, pids_of, ranks, results

pytestmark = pytest.mark.slow

DETECTED_S = 2.0


def is_trace(path: str) -> bool:
    return b"traceEvents" in Path(path).read_bytes()


async def test_calls_reach_their_ranks_and_errors_name_theirs_and_a_step_behind_a_long_one_is_not_overdue(tmp_path: Path) -> None:
    """The same ranks load other pipelines and write a trace each."""
    async with ranks(worker_extension="support.worker.extensions:Polite", profile_dir=str(tmp_path / "traces")) as executor:
        greet = {"timeout_s": 30, "name": "you"}
        assert results(await executor.call("greet", **greet)) == [f"hello you from rank {rank}" for rank in (0, 1)]
        only = await executor.call("greet", output_rank=1, **greet)
        assert [(reply.rank, result) for reply, result in zip(only, results(only), strict=True)] == [(1, "hello you from rank 1")]
        all_ran = await executor.call("greet", output_rank=1, exec_all_ranks=True, **greet)
        assert results(all_ran) == [None, "hello you from rank 1"]
        tripped = await executor.call("trip", timeout_s=30, only_rank=1)
        assert [(reply.rank, reply.error and reply.error.message) for reply in tripped] == [(0, None), (1, "ValueError: tripped")]
        with pytest.raises(RequestError, match=r"nap: no answer of rank 1 within 0.2 s") as late:
            await executor.call("nap", timeout_s=0.2, seconds=1.0, only_rank=1)
        assert late.value.code is ErrorCode.TIMEOUT
        # Nobody gets the late answer; the next call gets its own.
        assert results(await executor.call("greet", **greet)) == [f"hello you from rank {rank}" for rank in (0, 1)]

        napping = asyncio.create_task(executor.call("nap", timeout_s=30, seconds=1.5, only_rank=0))
        await asyncio.sleep(0)
        executor.broadcast_tick(Tick(1))
        report = await executor.next_report(0.5)
        assert report.done.number == 1
        await napping

        before = await image(executor)
        refused = await executor.call("re_init_pipeline", timeout_s=60, pipeline="FluxPipeline")
        assert [reply.error and reply.error.code for reply in refused] == [ErrorCode.INVALID_REQUEST] * 2
        assert await image(executor) == before
        loaded = await executor.call("re_init_pipeline", timeout_s=60, pipeline="StableDiffusion3Img2ImgPipeline")
        assert [reply.error for reply in loaded] == [None, None]
        assert results(await executor.call("pipeline_name", timeout_s=30)) == ["StableDiffusion3Img2ImgPipeline"] * 2
        assert results(await executor.call("list_loras", timeout_s=30)) == [[], []]
        await executor.call("re_init_pipeline", timeout_s=60, pipeline="StableDiffusion3Pipeline")
        assert await image(executor) == before

        assert results(await executor.call("profile", timeout_s=30, is_start=True, prefix="p")) == [True, True]
        await image(executor)
        paths = results(await executor.call("profile", timeout_s=60, is_start=False, prefix=""))
        assert [Path(path).name.split("-")[:2] for path in paths] == [["p", "rank0"], ["p", "rank1"]]
        assert all(is_trace(path) for path in paths)


async def test_a_rank_that_never_answers_a_call_is_taken_for_lost_and_one_that_hears_no_shutdown_is_killed_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ranks(worker_extension="support.worker.extensions:Polite", tick_timeout_s=0.5) as executor:
        with pytest.raises(RequestError):
            await executor.call("nap", timeout_s=0.1, seconds=600.0, only_rank=1)
        async with asyncio.timeout(30):
            loss = await executor.failed()
        assert (loss.fault, loss.reason) == (Fault.STALLED, "nap: rank 1 did not answer, also not in the 0.5 s after its time limit")
        await executor.restart()
        assert await image(executor)

        pid = pids_of(executor)[1]
        call_soon(executor, "nap", seconds=600.0, only_rank=1)
        await asyncio.sleep(0)
        started = time.monotonic()
        with caplog.at_level(logging.WARNING):
            await executor.stop()
        assert time.monotonic() - started > 3
        assert f"rank 1 (pid {pid}) did not end within 4 s and is killed" in caplog.text
        assert not process_exists(pid)


async def test_a_rank_that_hangs_in_a_step_loses_the_group_at_the_steps_deadline_with_the_rank_and_the_phase_named() -> None:
    async with ranks(worker_extension="support.worker.extensions:Stuck") as executor:
        executor.broadcast_tick(Tick(1, [request("a")]))
        pid = pids_of(executor)[1]
        who = rf"step 1 of 3 was not finished within 1 s: the main thread of rank 1 \(pid {pid}\), for which the others wait,"
        where = r"and is in execute_stepwise \(extensions.py:\d+\), called by _tick \(worker_proc.py:\d+\)"
        with pytest.raises(GroupFailed, match=rf"{who} made no progress for .* s, {where}"):
            await executor.next_report(1.0, phase="step 1 of 3")
        loss = await executor.failed()
        assert loss.fault is Fault.STALLED


async def test_every_way_of_losing_a_rank_is_noticed_at_once_and_the_next_generation_makes_the_same_image() -> None:
    async with ranks(worker_extension="support.worker.extensions:Polite") as executor:
        before = await image(executor)
        descriptors = open_descriptors()
        for generation, (how, fault, says) in enumerate(
            [
                (lambda: os.kill(pids_of(executor)[1], signal.SIGKILL), Fault.DIED, "was ended by SIGKILL"),
                (lambda: os.kill(pids_of(executor)[1], signal.SIGSTOP), Fault.STALLED, "was stopped by a signal"),
                (lambda: call_soon(executor, "leave", code=3), Fault.DIED, "exited with code 3"),
                (lambda: call_soon(executor, "lose_device"), Fault.DEVICE, "illegal memory access"),
            ],
            start=2,
        ):
            old = pids_of(executor)
            started = time.monotonic()
            how()
            loss = await executor.failed()
            assert time.monotonic() - started < DETECTED_S
            assert loss.fault is fault and says in loss.reason, loss
            with pytest.raises(GroupFailed):
                executor.broadcast_tick(Tick(9))
            await executor.restart()
            assert executor.generation == generation
            assert [pid for pid in old if process_exists(pid)] == []
            assert await image(executor) == before
        gc.collect()
        assert open_descriptors() <= descriptors


def call_soon(executor: RankExecutor, method: str, **kwargs: Any) -> None:
    async def call() -> None:
        with pytest.raises(GroupFailed):
            await executor.call(method, timeout_s=30, **kwargs)

    _calls.add(task := asyncio.create_task(call()))
    task.add_done_callback(_calls.discard)


_calls: set[asyncio.Task[None]] = set()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_frames_that_are_no_message_change_nothing_and_a_rank_killed_in_a_step_takes_the_group_with_it() -> None:
    async with ranks() as executor:
        before = await image(executor)
        current = executor._current
        assert current is not None
        for frame in (b"", b"\xc1\xc1", b"\x81\xa4type\xa4nope", os.urandom(50)):
            current.wire._broadcast.send(frame)
        assert await image(executor) == before
        await executor.call("list_loras", timeout_s=30)
        assert executor.dropped_frames == (0, 8)

        executor.broadcast_tick(Tick(1, [request("long", steps=200, height=64, width=64)]))
        for number in range(2, 200):
            executor.broadcast_tick(Tick(number))
        await executor.next_report(60)
        old = pids_of(executor)
        os.kill(old[0], signal.SIGKILL)
        with pytest.raises(GroupFailed, match=r"rank 0 .* was ended by SIGKILL"):
            for _ in range(200):
                await executor.next_report(60)
        await executor.restart()
        assert [pid for pid in old if process_exists(pid)] == []
        assert await image(executor) == before
        assert executor.dropped_frames == (0, 8)


async def fail_to_start(error: type[Exception], match: str, **settings: Any) -> None:
    """Start ranks, expect the error within a minute, and no process of theirs afterwards."""
    executor = RankExecutor(WorkerConfig(model=str(DIGITS_MODEL), served_name="digits", **settings))
    try:
        async with asyncio.timeout(60):
            with pytest.raises(error, match=match):
                await executor.start()
        pids = pids_of(executor)
    finally:
        await executor.stop()
    assert [pid for pid in pids if process_exists(pid)] == []


async def test_a_rank_that_dies_before_it_has_loaded_is_told_with_its_exit_code() -> None:
    extension = "support.worker.extensions:EarlyDeath"
    await fail_to_start(GroupFailed, r"rank 1 \(pid \d+\) exited with code 9", ranks=2, worker_extension=extension)


async def test_a_start_over_its_time_limit_says_so_and_leaves_no_process() -> None:
    await fail_to_start(LoadTimeout, r"the ranks did not load the model within 0.01 s", startup_timeout_s=0.01)


async def test_an_extension_that_cannot_be_imported_is_a_configuration_error() -> None:
    await fail_to_start(ConfigError, "--worker-extension 'nothing:There'", worker_extension="nothing:There")


async def test_ranks_meet_where_they_are_told_to() -> None:
    """Start ranks that meet at a given address and port, and restart them there. Expect ConfigError if another socket has the port."""
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
    async with ranks(rendezvous_host="127.0.0.2", rendezvous_port=port) as executor:
        before = await image(executor)
        os.kill(pids_of(executor)[0], signal.SIGKILL)
        await executor.failed()
        await executor.restart()
        assert await image(executor) == before
    with socket.create_server(("127.0.0.2", port)):
        taken = RankExecutor(WorkerConfig(model=str(DIGITS_MODEL), served_name="digits", rendezvous_host="127.0.0.2", rendezvous_port=port))
        with pytest.raises(ConfigError, match=f"--rendezvous-address 127.0.0.2:{port}: cannot listen"):
            await taken.start()
        await taken.stop()
