# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake as operations over fake ranks: beginning, joining, cancelling, refusals, and results."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from diffusion_worker.config import Offload
from diffusion_worker.engine.state.state_document import EngineState, SleepCall, SleepMode, SleepPolicy, WakeCall
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import MemoryTag, SleepLevel
from support.worker.fake_rank import WEIGHTS_BYTES
from support.worker.fake_rank_group import FakeRankGroup
from support.worker.sleep_rig import KILLED, SleepRig, sleep_rig, write_desired

pytestmark = pytest.mark.looptime

ALL = list(MemoryTag)


@pytest.fixture
async def rig() -> AsyncIterator[SleepRig]:
    async with sleep_rig() as rig:
        yield rig


# Results


@pytest.mark.parametrize("level", SleepLevel)
async def test_a_sleep_gives_the_memory_of_all_ranks_back_and_a_wake_serves_the_same_images(rig: SleepRig, level: SleepLevel) -> None:
    before = await rig.image()
    slept = await rig.sleep(level=level)
    assert (slept.error, slept.freed_bytes, slept.level) == (None, 2 * WEIGHTS_BYTES, level)
    assert (rig.engine.state, rig.asleep) == ("asleep", [ALL, ALL])
    assert [(ack.rank, ack.freed_bytes, ack.resident_bytes) for ack in rig.engine.last_acks] == [
        (0, WEIGHTS_BYTES, 0),
        (1, WEIGHTS_BYTES, 0),
    ]
    woken = await rig.wake()
    assert (woken.error, woken.freed_bytes, woken.level) == (None, None, level)
    assert rig.engine.state == "ready"
    assert (await rig.image()).images[0].pixels == before.images[0].pixels


async def test_a_warm_up_is_made_once_by_each_generation_of_ranks(rig: SleepRig) -> None:
    await rig.sleep()
    await rig.wake()
    assert rig.ranks.counts["warm_up"] == 1
    await rig.sleep()
    rig.ranks.lose(KILLED)
    await rig.until("restarting")
    await rig.until("asleep")
    assert rig.ranks.counts["warm_up"] == 1
    await rig.wake()
    assert rig.ranks.counts["warm_up"] == 2


# Ids and repeats


async def test_the_same_id_is_the_same_operation_while_it_runs_and_after_it(rig: SleepRig) -> None:
    call = SleepCall(operation_id="once")
    assert rig.engine.sleep(call) and rig.engine.sleep(call)
    await rig.over("once")
    assert not rig.engine.sleep(call)
    await rig.wake()
    # A late repeat of a finished call does not put the model to sleep again.
    assert not rig.engine.sleep(call)
    assert rig.ranks.calls.count("handle_sleep_task") == 1


async def test_a_sleep_of_the_sleeping_and_a_wake_of_the_awake_find_nothing_to_do_and_leave_the_last_result(rig: SleepRig) -> None:
    assert not rig.engine.wake(WakeCall(operation_id="idle"))
    await rig.sleep(operation_id="first")
    assert not rig.engine.sleep(SleepCall(operation_id="second"))
    assert rig.document.last_operation is not None and rig.document.last_operation.operation_id == "first"


async def test_a_second_sleep_and_a_second_wake_join_the_one_in_progress(rig: SleepRig) -> None:
    rig.begin_sleep(operation_id="first")
    assert rig.engine.sleep(SleepCall(operation_id="second"))
    assert await rig.over("second") == await rig.over("first")
    rig.begin_wake(operation_id="third")
    assert rig.engine.wake(WakeCall(operation_id="fourth"))
    assert (await rig.over("fourth")).operation_id == "third"
    assert rig.ranks.calls.count("handle_wake_task") == 1


async def test_a_sleep_of_a_sleeping_model_goes_deeper_where_the_level_asks_for_that(rig: SleepRig) -> None:
    await rig.sleep(level=SleepLevel.HOST_MEMORY)
    await rig.sleep(level=SleepLevel.DISCARD)
    assert {rank.memory.level for rank in rig.document.ranks} == {SleepLevel.DISCARD}
    assert not rig.engine.sleep(SleepCall(operation_id="shallow", level=SleepLevel.HOST_MEMORY))


async def test_a_wake_while_it_drains_cancels_the_sleep_and_the_model_serves_on(rig: SleepRig) -> None:
    request = await rig.running()
    rig.begin_sleep(operation_id="sleep")
    assert rig.engine.state == "draining"
    assert rig.engine.wake(WakeCall(operation_id="wake"))
    slept = await rig.over("sleep")
    assert slept.error is not None and slept.error.code == "Cancelled"
    assert (rig.engine.state, rig.ranks.calls) == ("ready", [])
    assert not rig.engine.wake(WakeCall(operation_id="wake"))
    rig.ranks.stepping.set()
    await request
    assert rig.engine.operations_done.failures["sleep"] == 0


async def test_a_wake_while_the_ranks_are_being_put_to_sleep_conflicts_and_names_the_sleep(rig: SleepRig) -> None:
    rig.ranks.calling.clear()
    rig.begin_sleep(operation_id="sleep")
    await rig.until("sleeping")
    with pytest.raises(RequestError, match="found sleep 'sleep'") as refused:
        rig.begin_wake()
    assert (refused.value.code, refused.value.details) == (ErrorCode.CONFLICT, {"operationId": "sleep", "kind": "sleep"})
    rig.ranks.calling.set()
    await rig.over("sleep")


async def test_a_sleep_while_it_wakes_conflicts_and_names_the_wake(rig: SleepRig) -> None:
    await rig.sleep()
    rig.begin_wake(operation_id="wake")
    with pytest.raises(RequestError, match="found wake 'wake'"):
        rig.begin_sleep()
    await rig.over("wake")


async def test_a_sleep_is_refused_with_the_option_that_excludes_it() -> None:
    async with sleep_rig(offload=Offload.MODEL) as rig:
        with pytest.raises(RequestError, match="sleep: not supported with --offload model"):
            rig.begin_sleep()
        # No fingerprint is ever needed for a comparison.
        assert rig.ranks.counts["fingerprint"] == 0


# Drain


async def test_a_sleep_waits_for_running_and_queued_requests_and_then_ends_those_that_are_late(rig: SleepRig) -> None:
    request = await rig.running()
    operation = rig.begin_sleep(deadline_seconds=5.0)
    with pytest.raises(RequestError) as ended:
        await request
    assert (ended.value.code, asyncio.get_running_loop().time()) == (ErrorCode.ASLEEP, 5.0)
    rig.ranks.stepping.set()
    assert (await rig.over(operation)).error is None


async def test_an_abort_ends_running_requests_at_once_and_waits_for_the_step_that_runs(rig: SleepRig) -> None:
    request = await rig.running()
    operation = rig.begin_sleep(mode=SleepMode.ABORT)
    with pytest.raises(RequestError) as ended:
        await request
    assert ended.value.code is ErrorCode.ASLEEP
    assert rig.ranks.calls == []
    rig.ranks.stepping.set()
    assert (await rig.over(operation)).error is None
    # The ranks forgot the request before they slept, and nothing of it comes back.
    await rig.wake()
    assert rig.document.in_flight == 0


@pytest.mark.parametrize("level", SleepLevel)
async def test_no_step_runs_on_memory_that_was_given_back_however_busy_the_model_is(rig: SleepRig, level: SleepLevel) -> None:
    """Sleep and wake ten times while six requests run each time. A step on such memory would fail an assertion in the fake ranks."""
    for mode in (SleepMode.WAIT, SleepMode.ABORT) * 5:
        requests = [asyncio.create_task(rig.image(seed)) for seed in range(6)]
        await asyncio.sleep(0)
        assert (await rig.sleep(level=level, mode=mode)).error is None
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(each, RequestError) or each.images for each in outcomes if not isinstance(each, BaseException))
        assert (await rig.wake()).error is None
    assert (await rig.image()).images


# Idle


async def test_a_sleep_for_idleness_is_refused_while_a_request_runs_or_was_there_lately(rig: SleepRig) -> None:
    request = await rig.running()
    with pytest.raises(RequestError, match=r"expected no request for 0.5 s, found the last one 0.000 s ago") as refused:
        rig.begin_sleep(if_idle_since=0.5)
    assert (refused.value.code, refused.value.retry_after_s) == (ErrorCode.BUSY, 0.5)
    rig.ranks.stepping.set()
    await request
    with pytest.raises(RequestError):
        rig.begin_sleep(if_idle_since=60)
    assert rig.engine.state == "ready"
    assert (await rig.sleep(if_idle_since=0.0)).error is None


async def test_the_policy_of_a_sleep_counts_also_where_its_idleness_does_not(rig: SleepRig) -> None:
    with pytest.raises(RequestError):
        rig.begin_sleep(if_idle_since=3600, policy=SleepPolicy.ON_IDLE)
    assert rig.document.policy is SleepPolicy.ON_IDLE


# Tags


async def test_a_partly_woken_model_does_not_serve_until_the_last_tag_which_verifies(rig: SleepRig) -> None:
    await rig.sleep()
    verified = rig.ranks.counts["fingerprint"]
    await rig.wake(tags=[MemoryTag.WEIGHTS])
    assert (rig.engine.state, rig.asleep[0]) == ("asleep", [MemoryTag.ADAPTERS, MemoryTag.CACHES])
    with pytest.raises(RequestError) as refused:
        await rig.image()
    assert (refused.value.code, rig.ranks.counts["fingerprint"]) == (ErrorCode.ASLEEP, verified)
    assert (await rig.sleep()).freed_bytes == 2 * WEIGHTS_BYTES
    assert rig.asleep == [ALL, ALL]
    await rig.wake(tags=[MemoryTag.WEIGHTS])
    await rig.wake(tags=[MemoryTag.ADAPTERS, MemoryTag.CACHES])
    assert (rig.engine.state, rig.ranks.counts["fingerprint"]) == ("ready", verified + 1)


async def test_a_wake_of_everything_conflicts_with_one_of_some_tags_in_progress(rig: SleepRig) -> None:
    await rig.sleep()
    rig.begin_wake(operation_id="some", tags=[MemoryTag.WEIGHTS])
    with pytest.raises(RequestError, match="found wake 'some'"):
        rig.begin_wake()
    await rig.over("some")


# At the start


async def test_with_the_policy_asleep_the_model_is_loaded_and_proved_before_it_sleeps(tmp_path: Path) -> None:
    desired = write_desired(tmp_path, "Asleep", sleep={"level": "Discard"})
    async with sleep_rig(desired_path=desired) as rig:
        assert (rig.engine.state, rig.ranks.starts_asleep, rig.ranks.counts["fingerprint"]) == ("asleep", [False], 2)
        assert {rank.memory.level for rank in rig.document.ranks} == {SleepLevel.DISCARD}


async def test_with_the_policy_on_idle_the_model_is_awake_at_first(tmp_path: Path) -> None:
    async with sleep_rig(desired_path=write_desired(tmp_path, "OnIdle")) as rig:
        assert (rig.engine.state, rig.document.policy) == ("ready", "OnIdle")


async def test_a_start_that_fails_is_known_to_those_that_wait_for_it() -> None:
    group = FakeRankGroup(config_error="no model_index.json in it")
    with pytest.raises(Exception, match="no model_index"):
        async with sleep_rig(group=group):
            pytest.fail("it started")


# Adapters


async def test_the_end_of_the_server_in_the_middle_of_anything_is_an_end_in_time() -> None:
    """Terminate the engine while it drains, sleeps, is asleep, wakes or restarts, and the ranks do not answer; it must end within 5 s."""
    for state in (EngineState.DRAINING, EngineState.SLEEPING, EngineState.ASLEEP, EngineState.WAKING, EngineState.RESTARTING):
        async with sleep_rig(drain_timeout_s=5.0) as rig:
            request = await rig.running() if state is EngineState.DRAINING else None
            if state in (EngineState.ASLEEP, EngineState.WAKING, EngineState.RESTARTING):
                await rig.sleep()
            rig.ranks.calling.clear()
            if state in (EngineState.DRAINING, EngineState.SLEEPING):
                rig.begin_sleep()
            if state is EngineState.WAKING:
                rig.begin_wake()
            if state is EngineState.RESTARTING:
                rig.ranks.loading.clear()
                rig.ranks.lose(KILLED)
            await rig.until(state)
            started = asyncio.get_running_loop().time()
            await rig.engine.terminate()
            assert asyncio.get_running_loop().time() - started <= 5.0
            assert rig.ranks.stopped and rig.engine.state == "terminating"
            if request is not None:
                with pytest.raises(RequestError) as ended:
                    await request
                assert ended.value.code is ErrorCode.TERMINATING
