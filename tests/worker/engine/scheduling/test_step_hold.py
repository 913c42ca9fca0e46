# SPDX-License-Identifier: Apache-2.0
"""Pause and resume: no step while it is paused, nothing lost by it, and sleep beside it. Over fake ranks."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from diffusion_worker.engine.state.state_document import OperationCall, PauseCall, SleepMode
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import ErrorReport
from support.worker.sleep_rig import KILLED, SleepRig, sleep_rig

pytestmark = pytest.mark.looptime

RESUME = OperationCall(operation_id="resume")


@pytest.fixture
async def rig() -> AsyncIterator[SleepRig]:
    async with sleep_rig(max_batch_size=1) as rig:
        yield rig


async def pause(rig: SleepRig, deadline_seconds: float = 60.0) -> None:
    await rig.engine.pause(PauseCall(operation_id="pause", deadline_seconds=deadline_seconds))


async def test_a_pause_is_answered_when_the_steps_that_run_are_over_and_the_ranks_are_quiet(rig: SleepRig) -> None:
    request = await rig.running()
    pausing = asyncio.create_task(pause(rig))
    await asyncio.sleep(1)
    assert (pausing.done(), rig.ranks.counts["synchronize"]) == (False, 0)
    rig.ranks.stepping.set()
    await pausing
    assert (rig.document.paused, rig.document.state, rig.ranks.counts["synchronize"]) == (True, "ready", 1)
    ticks = rig.engine.stats.ticks
    await asyncio.sleep(100)
    assert (rig.engine.stats.ticks, request.done()) == (ticks, False)
    rig.engine.resume(RESUME)
    assert (await request).images
    assert not rig.document.paused


async def test_results_that_are_finished_go_out_before_the_pause_is_answered(rig: SleepRig) -> None:
    request = await rig.running(steps=1)
    pausing = asyncio.create_task(pause(rig))
    rig.ranks.stepping.set()
    await pausing
    await asyncio.sleep(0.001)
    assert request.done() and request.result().images


async def test_queued_requests_keep_their_order_through_a_pause(rig: SleepRig) -> None:
    await pause(rig)
    done: list[int] = []

    async def asked(seed: int) -> None:
        await rig.image(seed)
        done.append(seed)

    requests = [asyncio.create_task(asked(seed)) for seed in range(4)]
    await asyncio.sleep(1)
    assert (rig.document.queued, rig.document.in_flight) == (4, 0)
    rig.engine.resume(RESUME)
    await asyncio.gather(*requests)
    assert done == [0, 1, 2, 3]


async def test_a_queued_request_that_is_given_up_is_gone_at_once_and_a_running_one_from_the_ranks_too(rig: SleepRig) -> None:
    running = await rig.running()
    queued = asyncio.create_task(rig.image(1))
    rig.ranks.stepping.set()
    await pause(rig)
    for request in (running, queued):
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    assert (rig.document.queued, rig.document.in_flight) == (0, 0)
    await asyncio.sleep(1)
    # The only message to ranks during a pause says which requests to forget.
    assert rig.ranks.active == {}


async def test_pause_and_resume_may_be_repeated(rig: SleepRig) -> None:
    await pause(rig)
    await pause(rig)
    for _ in range(2):
        rig.engine.resume(RESUME)
    assert (await rig.image()).images


async def test_a_pause_past_its_deadline_is_an_error_and_the_steps_go_on(rig: SleepRig) -> None:
    request = await rig.running()
    with pytest.raises(RequestError, match="pause: expected running steps to end within 3 s") as late:
        await pause(rig, 3.0)
    assert (late.value.code, rig.document.paused) == (ErrorCode.TIMEOUT, False)
    rig.ranks.stepping.set()
    assert (await request).images


async def test_an_error_of_a_rank_in_a_pause_reaches_the_caller_and_the_steps_go_on(rig: SleepRig) -> None:
    rig.ranks.method_errors["synchronize"] = ErrorReport(ErrorCode.RANK_FAILED, "a copy failed")
    with pytest.raises(RequestError, match="a copy failed"):
        await pause(rig)
    assert (await rig.image()).images


async def test_ranks_that_are_lost_in_a_pause_are_paused_when_they_are_back(rig: SleepRig) -> None:
    request = await rig.running()
    pausing = asyncio.create_task(pause(rig))
    await asyncio.sleep(1)
    rig.ranks.lose(KILLED)
    rig.ranks.stepping.set()
    await pausing
    await asyncio.sleep(10)
    assert (rig.document.paused, rig.document.state, request.done()) == (True, "ready", False)
    rig.engine.resume(RESUME)
    assert (await request).images


async def test_a_model_that_sleeps_cannot_be_paused_and_one_that_is_paused_can_sleep(rig: SleepRig) -> None:
    await pause(rig)
    assert (await rig.sleep()).error is None
    with pytest.raises(RequestError) as refused:
        await pause(rig)
    assert refused.value.code is ErrorCode.ASLEEP
    await rig.wake()
    request = asyncio.create_task(rig.image())
    await asyncio.sleep(10)
    assert (rig.document.paused, request.done()) == (True, False)
    rig.engine.resume(RESUME)
    assert (await request).images


async def test_a_paused_request_is_ended_by_a_sleep_that_aborts(rig: SleepRig) -> None:
    request = await rig.running()
    rig.ranks.stepping.set()
    await pause(rig)
    assert (await rig.sleep(mode=SleepMode.ABORT)).error is None
    with pytest.raises(RequestError) as ended:
        await request
    assert ended.value.code is ErrorCode.ASLEEP


async def test_a_resume_does_not_make_a_sleeping_model_step(rig: SleepRig) -> None:
    await pause(rig)
    await rig.sleep()
    rig.engine.resume(RESUME)
    assert (rig.engine.state, rig.document.paused) == ("asleep", False)


async def test_the_end_of_the_server_lets_what_was_paused_finish(rig: SleepRig) -> None:
    request = await rig.running()
    rig.ranks.stepping.set()
    await pause(rig)
    await rig.engine.terminate()
    assert (await request).images


async def test_a_pause_for_another_boot_is_refused(rig: SleepRig) -> None:
    with pytest.raises(RequestError) as refused:
        await rig.engine.pause(PauseCall(operation_id="pause", boot_id="boot-0"))
    assert refused.value.code is ErrorCode.WRONG_BOOT


# Probe


async def test_a_probe_tells_what_each_rank_holds_between_two_steps(rig: SleepRig) -> None:
    prints = await rig.engine.probe(OperationCall(operation_id="probe"))
    assert [(each.weights, each.probe) for each in prints] == [("weights", "probe")] * 2


async def test_a_model_that_does_not_serve_is_not_probed(rig: SleepRig) -> None:
    await rig.sleep()
    with pytest.raises(RequestError) as refused:
        await rig.engine.probe(OperationCall(operation_id="probe"))
    assert refused.value.code is ErrorCode.ASLEEP
