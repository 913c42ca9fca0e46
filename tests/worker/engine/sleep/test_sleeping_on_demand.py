# SPDX-License-Identifier: Apache-2.0
"""A model that requests wake by themselves, as the policy of the mounted file or of a call says. The ranks are fake."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from diffusion_worker.engine.sleep.calls import FIRST_RETRY_S, LAST_RETRY_S
from diffusion_worker.engine.sleep.policy import SleepRules
from diffusion_worker.engine.state.state_document import ColdMode, SleepPolicy
from diffusion_worker.errors import ConfigError, ErrorCode, RequestError
from diffusion_worker.messages import ErrorReport, MemoryTag
from support.worker.sleep_rig import KILLED, SleepRig, sleep_rig, write_desired

NO_MEMORY = ErrorReport(ErrorCode.INSUFFICIENT_MEMORY, "expected 4 GiB free, found 1 GiB")


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[SleepRig]:
    async with sleep_rig(desired_path=write_desired(tmp_path, "OnIdle", sleep={"wakeTimeoutSeconds": 9.0})) as rig:
        yield rig


# The policy


def test_without_a_file_a_model_is_always_awake_and_holds_requests() -> None:
    rules = SleepRules(None)
    assert (rules.policy, rules.cold_requests.mode, rules.cold_requests.max_held) == (SleepPolicy.ALWAYS_AWAKE, ColdMode.HOLD, 64)


def test_the_file_counts_as_it_is_now(tmp_path: Path) -> None:
    rules = SleepRules(write_desired(tmp_path, "AlwaysAwake"))
    write_desired(tmp_path, "OnIdle", sleep={"wakeTimeoutSeconds": 7}, coldRequests={"maxHeld": 3})
    assert (rules.policy, rules.sleep.wake_timeout_seconds, rules.cold_requests.max_held) == (SleepPolicy.ON_IDLE, 7.0, 3)


def test_whichever_of_a_call_and_the_file_is_newer_counts(tmp_path: Path) -> None:
    rules = SleepRules(write_desired(tmp_path, "AlwaysAwake"))
    rules.declare(SleepPolicy.ASLEEP)
    assert rules.policy is SleepPolicy.ASLEEP
    rules.declare(None)
    assert rules.policy is SleepPolicy.ASLEEP
    # Another setting changed: the file's sleep policy has not.
    write_desired(tmp_path, "AlwaysAwake", coldRequests={"maxHeld": 3})
    assert rules.policy is SleepPolicy.ASLEEP
    write_desired(tmp_path, "OnIdle")
    assert rules.policy is SleepPolicy.ON_IDLE


def test_a_file_that_breaks_or_goes_counts_as_it_was(tmp_path: Path) -> None:
    path = write_desired(tmp_path, "OnIdle", coldRequests={"maxHeld": 3})
    rules = SleepRules(path)
    Path(path).write_text('{"sleep": {"policy": "Sometimes"}}')
    assert (rules.policy, rules.cold_requests.max_held) == (SleepPolicy.ON_IDLE, 3)
    Path(path).unlink()
    assert rules.policy is SleepPolicy.ON_IDLE
    write_desired(tmp_path, "Asleep")
    assert rules.policy is SleepPolicy.ASLEEP


def test_a_mounted_config_map_is_followed_through_its_links(tmp_path: Path) -> None:
    for number, policy in enumerate(("AlwaysAwake", "OnIdle")):
        (tmp_path / f"v{number}").mkdir()
        write_desired(tmp_path / f"v{number}", policy)
    (tmp_path / "data").symlink_to("v0")
    rules = SleepRules(str(tmp_path / "data" / "desired.json"))
    (tmp_path / "new").symlink_to("v1")
    os.replace(tmp_path / "new", tmp_path / "data")  # noqa: PTH105 (as the kubelet does it)
    assert rules.policy is SleepPolicy.ON_IDLE


def test_a_file_that_is_wrong_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--desired"):
        SleepRules(str(tmp_path / "nothing"))


# On demand


@pytest.mark.looptime
async def test_many_requests_wake_it_once(rig: SleepRig) -> None:
    await rig.sleep()
    made = await asyncio.gather(*(rig.image(seed) for seed in range(20)))
    assert all(each.images for each in made)
    assert rig.ranks.calls.count("handle_wake_task") == 1
    last = rig.document.last_operation
    assert last is not None and (last.operation_id, last.kind, last.error) == ("demand-1", "wake", None)


@pytest.mark.looptime
async def test_every_wake_on_demand_has_an_id_of_its_own(rig: SleepRig) -> None:
    for number in (1, 2):
        await rig.sleep()
        await rig.image()
        assert rig.document.last_operation is not None and rig.document.last_operation.operation_id == f"demand-{number}"


@pytest.mark.looptime
async def test_a_request_that_comes_while_it_drains_cancels_the_sleep(rig: SleepRig) -> None:
    first = await rig.running()
    operation = rig.begin_sleep()
    second = asyncio.create_task(rig.image(1))
    result = await rig.over(operation)
    assert result.error is not None and result.error.code == "Cancelled"
    rig.ranks.stepping.set()
    await asyncio.gather(first, second)
    assert rig.ranks.calls == []


@pytest.mark.looptime
async def test_a_request_that_comes_while_the_ranks_are_being_put_to_sleep_wakes_them_after_it(rig: SleepRig) -> None:
    rig.ranks.calling.clear()
    operation = rig.begin_sleep()
    await rig.until("sleeping")
    request = asyncio.create_task(rig.image())
    await asyncio.sleep(1)
    assert rig.engine.state == "sleeping"
    rig.ranks.calling.set()
    assert (await rig.over(operation)).error is None
    assert (await request).images


@pytest.mark.looptime
async def test_a_request_that_comes_while_sleeping_ranks_are_started_again_wakes_the_next_ones(rig: SleepRig) -> None:
    await rig.sleep()
    rig.ranks.loading.clear()
    rig.ranks.lose(KILLED)
    await rig.until("restarting")
    request = asyncio.create_task(rig.image())
    await asyncio.sleep(1)
    rig.ranks.loading.set()
    assert (await request).images
    assert rig.ranks.starts_asleep == [False, True]


@pytest.mark.looptime
async def test_a_request_wakes_what_is_awake_in_part(rig: SleepRig) -> None:
    await rig.sleep()
    await rig.wake(tags=[MemoryTag.WEIGHTS])
    assert (await rig.image()).images


@pytest.mark.looptime
async def test_without_memory_the_wake_is_tried_again_with_longer_and_longer_pauses_while_a_request_waits(rig: SleepRig) -> None:
    await rig.sleep()
    rig.ranks.wake_errors = [NO_MEMORY] * 7
    assert (await rig.image()).images
    pauses = [min(FIRST_RETRY_S * 2**attempt, LAST_RETRY_S) for attempt in range(7)]
    assert asyncio.get_running_loop().time() == pytest.approx(sum(pauses), abs=0.6)
    assert rig.engine.operations_done.failures["wake"] == 7


@pytest.mark.looptime
async def test_when_nobody_waits_any_more_the_wake_is_not_tried_again(rig: SleepRig) -> None:
    await rig.sleep()
    rig.ranks.wake_errors = [NO_MEMORY] * 100
    request = asyncio.create_task(rig.image())
    await asyncio.sleep(5)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await asyncio.sleep(LAST_RETRY_S)
    tried = len(rig.ranks.wake_errors)
    await asyncio.sleep(100)
    assert (rig.engine.state, len(rig.ranks.wake_errors)) == ("asleep", tried)


@pytest.mark.looptime
async def test_a_wake_on_demand_has_the_deadline_of_the_file_and_its_requests_wait_for_the_new_ranks(rig: SleepRig) -> None:
    await rig.sleep()
    rig.ranks.hanging.add("handle_wake_task")
    request = asyncio.create_task(rig.image())
    await rig.until("restarting")
    assert asyncio.get_running_loop().time() == pytest.approx(9.0)
    rig.ranks.hanging.clear()
    assert (await request).images


@pytest.mark.looptime
async def test_a_wake_on_demand_that_changes_something_serves_its_requests_from_new_ranks_only(rig: SleepRig) -> None:
    await rig.sleep()
    rig.ranks.members[0].checksum = "other"
    assert (await rig.image()).images
    assert rig.document.generation == 2


@pytest.mark.looptime
@pytest.mark.parametrize("policy", [SleepPolicy.ALWAYS_AWAKE, SleepPolicy.ASLEEP])
async def test_a_sleep_that_somebody_asked_for_is_not_ended_by_a_request(rig: SleepRig, policy: SleepPolicy) -> None:
    await rig.sleep(policy=policy)
    with pytest.raises(RequestError) as refused:
        await rig.image()
    rig.engine.wake_on_demand()
    await asyncio.sleep(10)
    assert (refused.value.code, rig.engine.state) == (ErrorCode.ASLEEP, "asleep")


@pytest.mark.looptime
async def test_an_end_of_the_server_ends_the_tries_to_wake(rig: SleepRig) -> None:
    await rig.sleep()
    rig.ranks.wake_errors = [NO_MEMORY] * 100
    request = asyncio.create_task(rig.image())
    await asyncio.sleep(5)
    await rig.engine.terminate()
    with pytest.raises(RequestError) as ended:
        await request
    assert ended.value.code is ErrorCode.TERMINATING
