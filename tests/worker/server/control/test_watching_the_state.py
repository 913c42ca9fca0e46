# SPDX-License-Identifier: Apache-2.0
"""`GET /v1/state?after=…&wait=…`: the changes at which it answers, and those at which it waits on."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from diffusion_worker.engine.state import revision
from diffusion_worker.engine.state.revision import MOST_WATCHERS
from support.worker.server_edge import Client, Edge, serving_edge, sleeping_edge

SOON_S = 60.0


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge() as edge:
        yield edge


def watch(edge: Edge, after: str, wait: float = 30) -> asyncio.Task[Any]:
    return asyncio.create_task(edge.control.get("/v1/state", params={"after": after, "wait": wait}))


async def answered(watching: asyncio.Task[Any]) -> dict[str, Any]:
    async with asyncio.timeout(SOON_S):
        answer = await watching
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def still_waits(edge: Edge, watching: asyncio.Task[Any]) -> bool:
    """Return whether a watch still waits after every waiting client has looked again."""
    for _ in range(3):
        edge.engine._parts.signal.notify()
        for _ in range(20):
            await asyncio.sleep(0)
    return not watching.done()


async def test_a_revision_is_of_this_life_of_the_server_and_another_one_is_answered_at_once(edge: Edge) -> None:
    now = await edge.state()
    assert now["revision"].startswith("boot-1.")
    for other in ("boot-0.1", "boot-1.999"):
        assert (await answered(watch(edge, other)))["revision"] == now["revision"]


async def test_without_a_change_the_answer_comes_when_the_time_is_over(edge: Edge) -> None:
    now = await edge.state()
    assert (await answered(watch(edge, now["revision"], wait=0.05)))["revision"] == now["revision"]


async def test_ages_are_no_change(edge: Edge) -> None:
    await edge.request_images(prompt="p kumquatfen")
    now = await edge.state()
    watching = watch(edge, now["revision"])
    await asyncio.sleep(0.01)
    assert (await edge.state())["stateAgeSeconds"] > now["stateAgeSeconds"]
    assert await still_waits(edge, watching)
    watching.cancel()


async def test_a_change_of_state_is_answered_at_once(edge: Edge) -> None:
    watching = watch(edge, (await edge.state())["revision"])
    assert await still_waits(edge, watching)
    edge.ranks.calling.clear()
    await edge.operate("sleep")
    assert (await answered(watching))["state"] in ("draining", "sleeping")
    edge.ranks.calling.set()


async def test_the_end_of_an_operation_is_answered_at_once(edge: Edge) -> None:
    await edge.operate("sleep")
    seen = await edge.state()
    while seen["operation"] is not None or seen["lastOperation"] is None:
        seen = await answered(watch(edge, seen["revision"]))
    assert (seen["state"], seen["lastOperation"]["kind"]) == ("asleep", "sleep")


async def test_a_held_request_is_answered_at_once(tmp_path: Path) -> None:
    async with sleeping_edge(tmp_path) as edge:
        seen = await edge.state()
        client = Client(edge.data_application)
        while not seen["held"]["current"]:
            seen = await answered(watch(edge, seen["revision"]))
        edge.ranks.calling.set()
        await client.leave()


async def test_counters_alone_wait_for_their_time(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    first = (await edge.state())["revision"]
    edge.ranks.stepping.clear()
    running = asyncio.create_task(edge.request_images(prompt="p kumquatfen"))
    await edge.wait_state(inFlight=1)
    watching = watch(edge, first)
    assert await still_waits(edge, watching)
    monkeypatch.setattr(revision, "COUNTERS_S", 0.0)
    assert not await still_waits(edge, watching)
    assert (await answered(watching))["inFlight"] == 1
    edge.ranks.stepping.set()
    await running


async def test_the_end_of_a_drain_is_answered_at_once(edge: Edge) -> None:
    edge.ranks.stepping.clear()
    running = asyncio.create_task(edge.request_images(prompt="p kumquatfen"))
    await edge.wait_state(inFlight=1)
    drain = {"operationId": "drain", "bootId": "boot-1", "deadlineSeconds": 60}
    assert (await edge.control.post("/v1/drain", json=drain)).status_code == 202
    seen = await edge.state()
    assert seen["draining"] and seen["inFlight"] == 1
    watching = watch(edge, seen["revision"])
    assert await still_waits(edge, watching)
    edge.ranks.stepping.set()
    await running
    assert (await answered(watching))["inFlight"] == 0


async def test_more_work_than_one_batch_is_a_wish_for_another_replica_and_answered_at_once() -> None:
    async with serving_edge(max_batch_size=1) as edge:
        edge.ranks.stepping.clear()
        seen = await edge.state()
        requests = [asyncio.create_task(edge.request_images(prompt="p kumquatfen")) for _ in range(3)]
        while seen["inFlight"] + seen["queued"] < 2:
            seen = await answered(watch(edge, seen["revision"]))
        edge.ranks.stepping.set()
        await asyncio.gather(*requests)


async def test_an_adapter_that_comes_and_goes_is_a_change(edge: Edge) -> None:
    first = (await edge.state())["revision"]
    watching = watch(edge, first)
    await edge.put_adapter("stripes", "/loras/stripes")
    seen = await answered(watching)
    while not [one for one in seen["adapters"] if one["state"] == "Loaded"]:
        seen = await answered(watch(edge, seen["revision"]))
    waiting = watch(edge, seen["revision"])
    assert await still_waits(edge, waiting)
    await edge.delete_adapter("stripes")
    while seen["adapters"]:
        seen = await answered(waiting)
        waiting = watch(edge, seen["revision"])
    waiting.cancel()


async def test_what_is_told_of_many_adapters_has_a_pause_and_another_change_none(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    await edge.put_adapter("stripes", "/loras/stripes")
    monkeypatch.setattr(revision, "RECORDS_S", 1e9)
    monkeypatch.setattr(revision, "RECORD_S", 1e9)
    waiting = watch(edge, (await edge.state())["revision"])
    await edge.put_adapter("stripes", "/loras/stripes", priority=3)
    assert await still_waits(edge, waiting)
    monkeypatch.setattr(revision, "RECORD_S", 0.0)
    assert [one["priority"] for one in (await answered(waiting))["adapters"]] == [3]


async def test_eight_may_wait_and_the_ninth_is_refused(edge: Edge) -> None:
    now = (await edge.state())["revision"]
    waiting = [watch(edge, now) for _ in range(MOST_WATCHERS)]
    assert all([await still_waits(edge, one) for one in waiting])
    refused = await watch(edge, now)
    assert (refused.status_code, refused.json()["code"], refused.json()["retryable"]) == (429, "Overloaded", True)
    assert "at most 8 clients" in refused.json()["message"]
    assert (await edge.state())["revision"] == now  # a request that does not wait takes no place
    edge.engine.end_watches()
    assert [(await answered(one))["revision"] for one in waiting] == [now] * MOST_WATCHERS


async def test_a_watcher_that_leaves_gives_its_place_back(edge: Edge) -> None:
    now = (await edge.state())["revision"]
    before = asyncio.all_tasks()
    waiting = [watch(edge, now) for _ in range(MOST_WATCHERS)]
    assert await still_waits(edge, waiting[-1])
    for one in waiting:
        one.cancel()
    await edge.wait_tasks(before)
    last = watch(edge, now)
    assert await still_waits(edge, last)
    last.cancel()


async def test_nobody_waits_any_more_when_the_server_ends(edge: Edge) -> None:
    now = (await edge.state())["revision"]
    edge.engine.end_watches()
    assert (await answered(watch(edge, now)))["revision"] == now


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ({"after": "nonsense"}, "after"),
        ({"after": "boot-1.-1"}, "after"),
        ({"after": "boot-1.1", "wait": "-1"}, "wait"),
        ({"after": "boot-1.1", "wait": "soon"}, "wait"),
        ({"after": "boot-1.1", "wait": "3600"}, "wait"),
        ({"after": "boot-1.1", "wait": "nan"}, "wait"),
        ({"wait": "30"}, "after"),
        ({"since": "boot-1.1"}, "since"),
    ],
)
async def test_a_wrong_after_or_wait_is_refused_by_name(edge: Edge, query: dict[str, str], wrong: str) -> None:
    answer = await edge.control.get("/v1/state", params=query)
    assert (answer.status_code, answer.json()["code"]) == (400, "InvalidRequest")
    assert wrong in answer.json()["message"]
