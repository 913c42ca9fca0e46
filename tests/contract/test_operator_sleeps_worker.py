# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake by the operator's own client against the worker's real server: levels, policies, idleness, conflicts.

The ranks are fake. The operator's decisions are tested in test_operator_reconciles_sleep.py.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import httpx2
import pytest

from diffusion_operator.api.deployment_spec import SleepLevel, SleepPolicy
from diffusion_operator.api.worker_state import Operation, WorkerPhase, WorkerState
from diffusion_operator.plan.adapters.load_attempts import RACES
from support.operator.worker_driver import TOKEN, Driver, refusal
from support.worker.fake_rank_group import WEIGHTS_BYTES
from support.worker.process import DIGITS_MODEL, FAKE_PROGRAM, WorkerProcess

pytestmark = pytest.mark.slow
STEP_S = 0.02
LONG = {"prompt": "a red digit seven", "size": "64x64", "num_inference_steps": 50}
SHORT = LONG | {"num_inference_steps": 1}


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    slow = {"FAKE_WORKER": json.dumps({"stepSeconds": STEP_S})}
    with WorkerProcess(DIGITS_MODEL, ranks=2, program=FAKE_PROGRAM, token=TOKEN, env=slow) as worker:
        worker.wait_ready()
        yield worker


@pytest.fixture
async def driver(worker: WorkerProcess) -> AsyncIterator[Driver]:
    """Provide a client of a worker that is awake by policy, and restore that state afterwards."""
    driver = Driver(worker)
    yield driver
    await driver.clear()
    await driver.client.close()


@pytest.fixture
async def web(worker: WorkerProcess) -> AsyncIterator[httpx2.AsyncClient]:
    """Provide a client of the worker's data port."""
    async with httpx2.AsyncClient(base_url=worker.url, timeout=30) as web:
        yield web


async def ask(web: httpx2.AsyncClient, body: dict[str, object] = SHORT) -> httpx2.Response:
    return await web.post("/v1/images/generations", json=body)


async def begun(driver: Driver, web: httpx2.AsyncClient) -> asyncio.Task[httpx2.Response]:
    """Ask for an image of 50 steps, wait until the worker counts it as in flight, and return the task that gets the answer."""
    request = asyncio.create_task(ask(web, LONG))
    await driver.until(lambda state: state.in_flight)
    return request


def last(state: WorkerState) -> Operation:
    assert state.last_operation is not None
    return state.last_operation


# Levels and their reports


@pytest.mark.parametrize("level", list(SleepLevel))
async def test_every_level_of_the_operator_is_one_of_the_worker_and_told_with_seconds_and_bytes(driver: Driver, level: SleepLevel) -> None:
    await driver.sleep(level=level, operation_id=f"sleep-{level}")
    state = await driver.wait_for(WorkerPhase.ASLEEP)
    told = last(state)
    assert (told.operation_id, told.kind, told.error, told.level) == (f"sleep-{level}", "sleep", None, level)
    assert told.freed_bytes == 2 * WEIGHTS_BYTES
    assert 0 < told.seconds < 10
    assert [rank.state for rank in state.ranks] == ["asleep", "asleep"]
    await driver.wake(operation_id=f"wake-{level}")
    told = last(await driver.wait_for(WorkerPhase.READY))
    assert (told.operation_id, told.kind, told.error) == (f"wake-{level}", "wake", None)
    assert 0 < told.seconds < 10


async def test_the_age_of_a_state_begins_with_it(driver: Driver) -> None:
    await driver.sleep()
    first = await driver.wait_for(WorkerPhase.ASLEEP)
    second = await driver.state()
    assert 0 <= first.state_age_seconds <= second.state_age_seconds < 10


# Policies


@pytest.mark.parametrize("policy", list(SleepPolicy))
async def test_the_policy_of_a_sleep_is_the_workers_from_then_on(driver: Driver, policy: SleepPolicy) -> None:
    await driver.sleep(policy=policy)
    assert (await driver.wait_for(WorkerPhase.ASLEEP)).policy is policy


# Idleness by the worker's own clock


async def test_a_worker_that_was_used_a_moment_ago_refuses_to_sleep_for_idleness(driver: Driver, web: httpx2.AsyncClient) -> None:
    assert (await ask(web)).status_code == 200
    error = await refusal(driver.sleep(policy=SleepPolicy.ON_IDLE, if_idle_since_s=60))
    assert (error.code, error.status) == ("Busy", 503)
    assert error.code in RACES
    state = await driver.state()
    assert (state.state, state.operation) == (WorkerPhase.READY, None)
    assert state.last_request_age_seconds is not None and state.last_request_age_seconds < 60


# Overlapping operations


async def test_a_request_of_a_draining_worker_is_served_under_on_idle(driver: Driver, web: httpx2.AsyncClient) -> None:
    """Send a request to a draining worker. It cancels the sleep, so no request is refused because the model was idle."""
    running = await begun(driver, web)
    await driver.sleep(policy=SleepPolicy.ON_IDLE)
    late = await ask(web)
    assert (late.status_code, (await running).status_code) == (200, 200)


async def test_another_sleep_during_a_sleep_is_the_same_and_a_repeated_call_too(driver: Driver, web: httpx2.AsyncClient) -> None:
    """Repeat a sleep call during the sleep, with the same id and another, as an operator that restarts in the middle does."""
    request = await begun(driver, web)
    await driver.sleep(operation_id="sleep-3-1")
    await driver.sleep(operation_id="sleep-3-1")
    await driver.sleep(operation_id="sleep-3-2")
    state = await driver.state()
    assert state.operation is not None and state.operation.operation_id == "sleep-3-1"
    assert (await request).status_code == 200
    assert last(await driver.wait_for(WorkerPhase.ASLEEP)).operation_id == "sleep-3-1"


# Adapters of a sleeping worker


async def test_adapters_that_a_deep_sleep_dropped_are_loaded_again_before_the_worker_serves(driver: Driver) -> None:
    await driver.put("style", driver.lora("style"), scale=0.5)
    await driver.sleep(level=SleepLevel.DISCARD)
    assert [one.state for one in (await driver.wait_for(WorkerPhase.ASLEEP)).adapters] == ["Deferred"]
    await driver.wake()
    [adapter] = (await driver.wait_for(WorkerPhase.READY)).adapters
    assert (adapter.state, adapter.scale, adapter.ranks_loaded) == ("Loaded", 0.5, 2)
