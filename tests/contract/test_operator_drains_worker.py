# SPDX-License-Identifier: Apache-2.0
"""Drains: the operator's real reconciles end a replica whose real worker server is busy. The ranks are fake, and the operator's time
is virtual."""

import asyncio
import json

import httpx2
import pytest

from diffusion_operator.api.names import POD
from support.operator.reconcile_story import POD_NAME, Story, story

pytestmark = pytest.mark.slow
SLOW_STEPS = {"FAKE_WORKER": json.dumps({"stepSeconds": 0.05})}
IMAGE = {"prompt": "a red digit seven", "size": "64x64", "num_inference_steps": 1}
LONG = IMAGE | {"num_inference_steps": 60}


async def ask(told: Story, **body: object) -> httpx2.Response:
    async with httpx2.AsyncClient(base_url=told.worker.url, timeout=60) as web:
        return await web.post("/v1/images/generations", json=body)


def there(told: Story) -> bool:
    return POD_NAME in told.rig.cluster.names(POD)


async def test_a_long_request_survives_a_scale_down_and_is_answered() -> None:
    async with story(env=SLOW_STEPS) as told, asyncio.timeout(60):
        request = asyncio.create_task(ask(told, **LONG))
        await told.wait(lambda: told.worker.state()["inFlight"], told.worker.state)
        told.change(replicas=0)
        await told.wait(lambda: told.worker.state()["draining"], told.worker.state)
        assert told.worker.state()["state"] == "terminating"
        refused = await ask(told, **IMAGE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "Terminating")
        assert refused.headers["retry-after"]
        assert there(told) and not request.done(), "the pod is there while its request runs"
        await told.wait(lambda: not there(told), told.worker.state)
        assert (await request).status_code == 200
        assert told.rig.errors == []
        assert await asyncio.to_thread(told.worker.terminate) == 0


async def test_a_request_that_outlasts_the_drain_ends_with_a_code_and_the_pod_goes() -> None:
    async with story(env=SLOW_STEPS, drain={"timeoutSeconds": 1}) as told, asyncio.timeout(60):
        request = asyncio.create_task(ask(told, **LONG | {"num_inference_steps": 190}))
        await told.wait(lambda: told.worker.state()["inFlight"], told.worker.state)
        told.change(replicas=0)
        await told.wait(lambda: not there(told), told.worker.state)
        answer = await request
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "Terminating")


async def test_a_held_request_is_refused_at_once_when_its_sleeping_replica_goes() -> None:
    slow = {"FAKE_WORKER": json.dumps({"wakeSeconds": 30})}
    async with story(env=slow, sleep={"policy": "OnIdle", "idleSeconds": 1, "minAwakeSeconds": 0}) as told, asyncio.timeout(60):
        await told.wait(lambda: told.worker.state()["state"] == "asleep", told.worker.state)
        request = asyncio.create_task(ask(told, **IMAGE))
        await told.wait(lambda: told.worker.state()["held"]["current"], told.worker.state)
        told.change(replicas=0)
        await told.wait(request.done, told.worker.state)
        answer = await request
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "Terminating")
        await told.wait(lambda: not there(told), told.worker.state)
