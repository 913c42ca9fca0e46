# SPDX-License-Identifier: Apache-2.0
"""The operator's real reconciles and the worker's real server over a sleep. Tests are about decisions, wakes, and an operator that is
restarted in the middle.

The ranks are fake. The operator's seconds are virtual; the worker's own clock decides over idleness.
"""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from diffusion_operator.api.names import ADAPTER
from support.operator.reconcile_story import POD_NAME, Story, story
from support.operator.rig import adapter
from support.worker.process import DIGITS

pytestmark = pytest.mark.slow

# The CRD requires at least ten seconds; the operator and the worker accept less.
IDLE = {"policy": "OnIdle", "idleSeconds": 1, "minAwakeSeconds": 0}
SLOW_STEPS = {"FAKE_WORKER": json.dumps({"stepSeconds": 0.05})}
IMAGE = {"prompt": "a red digit seven", "size": "64x64", "num_inference_steps": 1}
LONG = IMAGE | {"num_inference_steps": 40}


def lora(folder: Path, name: str) -> str:
    """Copy an adapter to a folder of this name and return its path; the ranks are fake, so its content is irrelevant."""
    return str(shutil.copytree(DIGITS / "loras" / "frame", folder / name))


@asynccontextmanager
async def asking(told: Story, body: dict[str, Any] = IMAGE) -> AsyncIterator["asyncio.Task[httpx2.Response]"]:
    """Send a request and provide its task, which may end by itself; at the end of the block it is cancelled if it still runs."""
    async with httpx2.AsyncClient(base_url=told.worker.url, timeout=60) as web:
        request = asyncio.create_task(web.post("/v1/images/generations", json=body))
        try:
            yield request
        finally:
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)


async def answer(told: Story, body: dict[str, Any] = IMAGE) -> httpx2.Response:
    """Send a request and return its answer, while the operator continues."""
    async with asking(told, body) as request:
        await told.wait(request.done, told.worker.state)
        return await request


def state(told: Story) -> str:
    return str(told.worker.state()["state"])


async def until_state(told: Story, wanted: str) -> None:
    """Wait until the worker reports a state; if it is `asleep` or `ready`, wait until the operator's status shows it too."""
    await told.wait(lambda: state(told) == wanted, told.worker.state)
    shown = {"asleep": "Asleep", "ready": "Awake"}.get(wanted)
    if shown is not None:
        await told.wait(lambda: told.rig.states() == [shown], told.rig.status)


def last_operation(told: Story) -> dict[str, Any]:
    return dict(told.worker.state()["lastOperation"])


# The cycle


async def test_an_idle_model_sleeps_a_request_wakes_it_and_both_are_told() -> None:
    async with story(sleep=IDLE) as told:
        rig = told.rig
        await until_state(told, "asleep")
        await told.until_deployment("Ready", "True", "AsleepWakeable")
        await told.until_deployment("Awake", "False", "AllAsleep")
        assert rig.routable() == [POD_NAME], "nobody else could hold a request"
        assert (rig.status()["awakeReplicas"], rig.status()["asleepReplicas"]) == (0, 1)
        assert rig.cluster.events().count("Slept") == 1
        slept = last_operation(told)

        assert (await answer(told)).status_code == 200
        await told.wait(lambda: "Woke" in rig.cluster.events(), rig.cluster.events)
        [note] = rig.cluster.notes("Slept")
        assert re.search(r"\d s|\d seconds", note) and re.search(r"\d ?(bytes|[KMG]i?B)", note), note
        assert slept["freedBytes"] == 1_000_000
        [note] = rig.cluster.notes("Woke")
        assert re.search(r"\d s|\d seconds", note), note

        await until_state(told, "asleep")
        await told.wait(lambda: rig.cluster.events().count("Slept") == 2, rig.cluster.events)
        assert rig.cluster.events().count("Woke") == 1
        assert rig.errors == []


async def test_a_model_that_is_used_does_not_sleep() -> None:
    async with story(env=SLOW_STEPS, sleep=IDLE) as told, asking(told, LONG) as request:
        await told.wait(request.done, told.worker.state)
        assert (await request).status_code == 200
        assert told.worker.state()["lastOperation"] is None
        assert told.rig.cluster.events().count("Slept") == 0


async def test_a_replica_that_is_to_stay_awake_stays_awake() -> None:
    async with story(sleep=IDLE | {"minAwake": 1}) as told:
        await told.wait(lambda: told.worker.state()["stateAgeSeconds"] > 2.5, told.worker.state)
        assert (state(told), told.rig.states()) == ("ready", ["Awake"])
        told.change(sleep={"minAwake": 0})
        await until_state(told, "asleep")


# Policies of a sleeping model


async def test_every_change_of_the_policy_reaches_a_sleeping_worker() -> None:
    """Change the policy of a sleeping worker three times; the second change is found by an operator at its start."""
    async with story(sleep=IDLE) as told:
        await until_state(told, "asleep")
        told.change(sleep={"policy": "Asleep"})
        await told.until_deployment("Ready", "False", "SleepRequested")
        await told.wait(lambda: told.worker.state()["policy"] == "Asleep", told.worker.state)
        refused = await answer(told)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "Asleep")
        assert state(told) == "asleep"

        told.change(sleep={"policy": "OnIdle"})
        told.rig.restart_operator()
        await told.until_deployment("Ready", "True", "AsleepWakeable")
        await told.wait(lambda: told.worker.state()["policy"] == "OnIdle", told.worker.state)
        assert (await answer(told)).status_code == 200

        await until_state(told, "asleep")
        told.change(sleep={"policy": "AlwaysAwake"})
        await until_state(told, "ready")
        await told.until_deployment("Ready", "True", "Serving")
        assert told.worker.state()["policy"] == "AlwaysAwake"


async def test_how_many_are_held_is_told_to_a_worker_that_runs() -> None:
    async with story(sleep=IDLE) as told:
        await until_state(told, "asleep")
        told.change(coldRequests={"mode": "Reject"})
        for _ in range(3):
            await told.step()
        refused = await answer(told)
        assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1


# Adapters of a sleeping model


async def test_adapters_that_change_while_the_model_sleeps_are_right_at_the_first_request(tmp_path: Path) -> None:
    async with story(sleep=IDLE) as told:
        rig = told.rig
        for name in ("stays", "goes"):
            rig.cluster.put(adapter(name, lora(tmp_path, name)))
        await told.wait(lambda: {"stays", "goes"} <= told.records().keys(), told.records)
        await until_state(told, "asleep")
        rig.cluster.put(adapter("comes", lora(tmp_path, "comes")))
        rig.cluster.change(ADAPTER, "stays", lambda spec: spec.update(defaultScale="0.5"))
        rig.cluster.remove(ADAPTER, "goes")
        rig.restart_operator()
        await told.wait(lambda: told.records().get("comes", ("",))[0] == "Deferred", told.records)
        await told.wait(lambda: told.records()["goes"][0] == "Draining", told.records)
        assert rig.adapter_condition("Ready", "comes") == ("True", "AsleepWakeable")
        assert (await answer(told, IMAGE | {"model": "goes"})).status_code == 404
        assert state(told) == "asleep", "a request for what is not there wakes nobody"

        assert (await answer(told, IMAGE | {"model": "comes"})).status_code == 200
        document = told.worker.state()
        assert {one["name"]: (one["state"], one["scale"]) for one in document["adapters"]} == {
            "stays": ("Loaded", 0.5), "comes": ("Loaded", 1.0),
        }  # fmt: skip
        for name in ("stays", "comes"):
            await told.wait(lambda name=name: rig.adapter_condition("Ready", name)[0] == "True" or state(told) != "ready", rig.status)
        assert rig.errors == []


# Faults


async def test_a_server_killed_asleep_is_asleep_again_and_nobody_says_that_it_woke() -> None:
    async with story(sleep=IDLE) as told:
        await until_state(told, "asleep")
        boot = told.worker.boot_id
        told.kill_worker()
        assert told.worker.boot_id != boot
        await until_state(told, "asleep")
        await told.wait(lambda: told.rig.status()["replicaStates"][0]["bootId"] == told.worker.boot_id, told.rig.status)
        assert {"Woke"}.isdisjoint(told.rig.cluster.events())
        assert told.rig.condition("Ready") == ("True", "AsleepWakeable")
        assert (await answer(told)).status_code == 200


async def test_a_wake_that_lacks_memory_is_tried_again_until_it_works() -> None:
    """Let the first wake fail for lack of memory. A condition says so until the operator's next wake succeeds; no client takes part."""
    env = {"FAKE_WORKER": json.dumps({"wakeErrors": ["InsufficientMemory"]})}
    async with story(env=env) as told:
        told.change(sleep={"policy": "Asleep"})
        await until_state(told, "asleep")
        told.change(sleep={"policy": "AlwaysAwake"})
        message = await told.until_deployment("Awake", "False", "InsufficientGPUMemory")
        assert "InsufficientMemory" in message
        await until_state(told, "ready")
        assert last_operation(told)["error"] is None


# An operator that is restarted in the middle


async def test_an_operator_restarted_while_the_worker_drains_does_not_sleep_it_twice() -> None:
    async with story(env=SLOW_STEPS) as told, asking(told, LONG) as request:
        await told.wait(lambda: told.worker.state()["inFlight"], told.worker.state)
        told.change(sleep={"policy": "Asleep"})
        await told.wait(lambda: state(told) == "draining", told.worker.state)
        operation = told.worker.state()["operation"]["operationId"]
        told.rig.restart_operator()
        await told.wait(request.done, told.worker.state)
        assert (await request).status_code == 200
        await until_state(told, "asleep")
        assert last_operation(told)["operationId"] == operation
        assert told.rig.cluster.events().count("Slept") == 1
        assert told.rig.errors == []


async def test_an_operator_restarted_while_the_model_sleeps_leaves_it_asleep_and_sees_it_wake() -> None:
    async with story(sleep=IDLE) as told:
        await until_state(told, "asleep")
        before = last_operation(told)
        told.rig.restart_operator()
        for _ in range(20):
            await told.step()
        assert (state(told), last_operation(told), told.rig.states()) == ("asleep", before, ["Asleep"])
        assert told.rig.routable() == [POD_NAME]
        assert told.rig.cluster.events().count("Slept") == 1
        async with asking(told) as request:
            told.rig.restart_operator()
            await told.wait(request.done, told.worker.state)
            assert (await request).status_code == 200
        await told.wait(lambda: told.rig.cluster.events().count("Woke") == 1, told.rig.cluster.events)


async def test_an_operator_restarted_while_memory_comes_waits_for_its_end() -> None:
    slow = {"FAKE_WORKER": json.dumps({"wakeSeconds": 0.5})}
    async with story(env=slow) as told:
        await until_state(told, "ready")
        told.change(sleep={"policy": "Asleep"})
        await until_state(told, "asleep")
        told.change(sleep={"policy": "AlwaysAwake"})
        await told.wait(lambda: state(told) == "waking", told.worker.state)
        operation = told.worker.state()["operation"]["operationId"]
        told.rig.restart_operator()
        await until_state(told, "ready")
        assert last_operation(told)["operationId"] == operation
        assert told.rig.errors == []


async def test_a_policy_taken_back_while_the_worker_drains_ends_awake() -> None:
    """Take the policy back while the worker drains, with a restart of the operator in between. The wake cancels the sleep."""
    async with story(env=SLOW_STEPS) as told, asking(told, LONG) as request:
        await told.wait(lambda: told.worker.state()["inFlight"], told.worker.state)
        told.change(sleep={"policy": "Asleep"})
        await told.wait(lambda: state(told) == "draining", told.worker.state)
        told.rig.restart_operator()
        told.change(sleep={"policy": "AlwaysAwake"})
        await told.wait(request.done, told.worker.state)
        assert (await request).status_code == 200
        await until_state(told, "ready")
        await told.until_deployment("Ready", "True", "Serving")
        assert (await answer(told)).status_code == 200
