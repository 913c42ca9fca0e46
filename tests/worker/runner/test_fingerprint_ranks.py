# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake of real rank processes, verified by their fingerprints: levels, restarts, starts asleep, deaths, corruption."""

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diffusion_worker.engine.state.state_document import RankState
from diffusion_worker.errors import ErrorCode, Fault, GroupFailed
from diffusion_worker.lora.request import LoadOptions, LoRARequest
from diffusion_worker.messages import MemoryTag, SleepLevel, TaskAck, TaskStatus, Tick, WakeTask
from diffusion_worker.ranks.executor import RankExecutor
from support.runner.rank_processes import run
from support.runner.rig import request
from support.worker.extensions import write_limit
from support.worker.process import DIGITS, DIGITS_MODEL, process_exists, resident_bytes
from support.worker.real_ranks import call, fingerprints, image, pids_of, ranks, sleep, wake

pytestmark = pytest.mark.slow

CORRUPTING = "support.worker.extensions:Corrupting"
STRIPES = LoRARequest(lora_name="stripes", lora_int_id=1, lora_path=str(DIGITS / "loras" / "stripes"))


def states(executor: RankExecutor) -> list[RankState]:
    return [document.state for document in executor.documents()]


def shares_resident(executor: RankExecutor) -> list[float]:
    """Return, for each rank, the share of its weights that the kernel counts in memory."""
    return [resident_bytes(each.pid or 0, each.memory.mappings) / each.memory.weights_bytes for each in executor.documents()]


async def lost(executor: RankExecutor) -> Fault:
    return (await executor.failed()).fault


async def test_two_ranks_have_the_same_fingerprint_and_keep_it_over_both_levels_a_restart_and_a_repeated_task() -> None:
    async with ranks(worker_extension=CORRUPTING) as executor:
        before, made = await fingerprints(executor), await image(executor)
        assert before[0] == before[1] and before[0].probe is not None
        for number, level in enumerate(SleepLevel):
            acks = await sleep(executor, f"sleep-{number}", level)
            assert states(executor) == [RankState.ASLEEP] * 2
            assert all(share <= 0.02 for share in shares_resident(executor))
            assert all(ack.freed_bytes >= 0.98 * each.memory.weights_bytes for ack, each in zip(acks, executor.documents(), strict=True))
            assert [reply.error and reply.error.code for reply in await executor.call("fingerprint", timeout_s=30, probe=True)] == [
                ErrorCode.ASLEEP
            ] * 2
            woken = await wake(executor, f"wake-{number}")
            assert await fingerprints(executor) == before
            assert (await sleep(executor, f"sleep-{number}", level), await wake(executor, f"wake-{number}")) == (acks, woken)
            assert states(executor) == [RankState.READY] * 2
        await call(executor, "flip_weight", output_rank=1)
        spoilt = await fingerprints(executor)
        assert (spoilt[0], spoilt[1].weights == before[1].weights) == (before[0], False)
        pids = pids_of(executor)
        executor.lose("a fingerprint is not what it was", Fault.DEFECT)
        with pytest.raises(GroupFailed, match="a fingerprint is not what it was"):
            await executor.call("list_loras", timeout_s=30)
        await executor.restart()
        assert not set(pids) & set(pids_of(executor)) and not any(map(process_exists, pids))
        assert await fingerprints(executor) == before
        assert await image(executor) == made


async def test_ranks_that_start_asleep_hold_nothing_and_make_the_same_image_once_they_are_woken() -> None:
    async with ranks() as executor:
        before, made, known = await fingerprints(executor), await image(executor), executor.documents()
    async with ranks(asleep=True) as executor:
        document = executor.documents()[0]
        assert states(executor) == [RankState.ASLEEP] * 2
        assert (document.memory.asleep, document.memory.level) == (list(MemoryTag), SleepLevel.DISCARD)
        assert document.memory.weights_bytes == known[0].memory.weights_bytes
        assert all(share <= 0.02 for share in shares_resident(executor))
        refused = await executor.call("warm_up", timeout_s=30)
        assert [reply.error and reply.error.code for reply in refused] == [ErrorCode.ASLEEP] * 2
        executor.broadcast_tick(Tick(1, [request("a")]))
        assert [(each.request_id, each.error.code) for each in (await executor.next_report(30)).done.failed] == [("a", ErrorCode.ASLEEP)]
        acks = await wake(executor)
        assert all(ack.resident_bytes >= each.memory.weights_bytes for ack, each in zip(acks, known, strict=True))
        await call(executor, "warm_up")
        assert await fingerprints(executor) == before
        assert await image(executor) == made
        # A rank dies while the others sleep: the next ones start asleep too.
        await sleep(executor)
        old = pids_of(executor)
        os.kill(old[1], signal.SIGKILL)
        assert await lost(executor) is Fault.DIED
        await executor.restart(asleep=True)
        assert not set(old) & set(pids_of(executor))
        assert states(executor) == [RankState.ASLEEP] * 2 and all(share <= 0.02 for share in shares_resident(executor))
        # A rank that is stopped is noticed while all sleep, too.
        os.kill(pids_of(executor)[0], signal.SIGSTOP)
        assert await lost(executor) is Fault.STALLED
        await executor.restart(asleep=True)
        await wake(executor)
        assert await fingerprints(executor) == before
        assert await image(executor) == made


async def test_ranks_are_quiet_only_when_every_report_before_has_come() -> None:
    async with ranks() as executor:
        executor.broadcast_tick(Tick(1, [request("a")]))
        for number in range(2, 6):
            executor.broadcast_tick(Tick(number))
        await call(executor, "synchronize")
        reports = [await executor.next_report(0.0) for _ in range(5)]
        assert [name.request_id for report in reports for name in report.done.finished] == ["a"]


async def test_a_rank_that_dies_in_the_middle_of_a_wake_loses_the_group() -> None:
    async with ranks() as executor:
        before = await fingerprints(executor)
        await sleep(executor)
        # The rank is stopped before the call, so it is certainly within it. The stop is too short to be noticed.
        os.kill(pids_of(executor)[1], signal.SIGSTOP)
        waking = asyncio.create_task(executor.call("handle_wake_task", timeout_s=30, task=WakeTask("w")))
        await asyncio.sleep(0)
        os.kill(pids_of(executor)[1], signal.SIGKILL)
        with pytest.raises(GroupFailed, match=r"rank 1 .* was ended by SIGKILL"):
            await waking
        await executor.restart()
        assert await fingerprints(executor) == before


async def test_what_is_spoilt_in_a_mirror_an_adapter_or_the_model_s_file_is_seen_after_the_wake(tmp_path: Path) -> None:
    model = Path(shutil.copytree(DIGITS_MODEL, tmp_path / "model"))
    async with ranks(ranks=1, model=str(model), worker_extension=CORRUPTING) as executor:
        await call(executor, "add_lora", request=STRIPES, options=LoadOptions())
        [before] = await fingerprints(executor)
        assert list(before.adapters) == [1]
        await call(executor, "flip_adapter", lora_int_id=1)
        [spoilt] = await fingerprints(executor)
        assert (spoilt.weights, spoilt.adapters == before.adapters) == (before.weights, False)
        await call(executor, "flip_adapter", lora_int_id=1)
        await call(executor, "flip_mirror")
        assert await fingerprints(executor) == [before]
        await sleep(executor, "s1")
        await wake(executor, "w1")
        [spoilt] = await fingerprints(executor)
        assert (spoilt.weights == before.weights, spoilt.adapters) == (False, before.adapters)
        await call(executor, "flip_mirror")
        for number, level in enumerate(SleepLevel, start=2):
            await sleep(executor, f"s{number}", level)
            spoil(model)
            await wake(executor, f"w{number}")
            [spoilt] = await fingerprints(executor)
            assert spoilt.weights != before.weights
            spoil(model)


async def test_a_rank_without_room_says_so_and_sleeps_on_and_wakes_once_there_is_room(tmp_path: Path) -> None:
    async with ranks(worker_extension=CORRUPTING) as executor:
        before = await fingerprints(executor)
        await sleep(executor)
        await call(executor, "limit_memory", cgroup=str(tmp_path), output_rank=1)
        write_limit(tmp_path, free_bytes=1 << 20)
        woken, short = await wake(executor)
        assert (woken.status, short.status, short.error_code) == (TaskStatus.SUCCESS, TaskStatus.ERROR, ErrorCode.INSUFFICIENT_MEMORY)
        assert states(executor) == [RankState.READY, RankState.ASLEEP]
        assert shares_resident(executor)[1] <= 0.02
        put_back = await sleep(executor, "back")
        assert [ack.freed_bytes > 0 for ack in put_back] == [True, False]
        assert states(executor) == [RankState.ASLEEP] * 2
        write_limit(tmp_path, free_bytes=1 << 30)
        assert [ack.status for ack in await wake(executor, "again")] == [TaskStatus.SUCCESS] * 2
        assert await fingerprints(executor) == before


async def test_a_file_that_is_known_to_have_changed_leaves_the_rank_asleep_with_its_name_told(tmp_path: Path) -> None:
    model = Path(shutil.copytree(DIGITS_MODEL, tmp_path / "model"))
    async with ranks(ranks=1, model=str(model)) as executor:
        await sleep(executor)
        os.utime(weights_file(model))
        [reply] = await executor.call("handle_wake_task", timeout_s=30, task=WakeTask("w"))
        ack = msgspec.msgpack.decode(reply.result or b"", type=TaskAck)
        assert (ack.status, ack.error_code) == (TaskStatus.ERROR, ErrorCode.ENGINE_FAILED)
        assert ack.error_msg is not None and weights_file(model).name in ack.error_msg
        assert states(executor) == [RankState.ASLEEP]
        assert all(share <= 0.02 for share in shares_resident(executor))


async def test_ranks_that_share_the_memory_have_no_fingerprint() -> None:
    async with ranks(shard=2) as executor:
        refused = await executor.call("fingerprint", timeout_s=30, probe=True)
        assert {reply.error and reply.error.message for reply in refused} == {
            "fingerprint: not supported with --shard: it serves to check a wake, and this worker never sleeps"
        }


@pytest.mark.parametrize("kind", ["tensor", "sequence"])
def test_ranks_that_share_layers_or_tokens_have_fingerprints_that_a_sleep_does_not_change(kind: str) -> None:
    found: list[dict[str, Any]] = run("support.runner.scenarios:over_a_sleep", **{kind: 2})
    for each in found:
        assert each["before"] == each["after"]
        assert each["before"].probe is not None
        assert each["spoilt"].weights != each["before"].weights
    first, second = (each["before"] for each in found)
    assert first.probe == second.probe
    assert (first.weights == second.weights) is (kind == "sequence")


def weights_file(model: Path) -> Path:
    return max((model / "transformer").glob("*.safetensors"), key=lambda path: path.stat().st_size)


def spoil(model: Path) -> None:
    """Flip the lowest bit of the last byte of the transformer's largest weights file, and restore its times.

    The file's size and times do not show the change.
    """
    path = weights_file(model)
    before, last = path.stat(), path.read_bytes()[-1]
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
