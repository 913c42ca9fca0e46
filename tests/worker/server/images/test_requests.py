# SPDX-License-Identifier: Apache-2.0
"""Requests that are cancelled by their id or refused for lack of memory, and a control port that never waits for a step."""

import asyncio
from collections.abc import AsyncIterator

import httpx2
import pytest

from support.worker.server_edge import DEADLINE_S, Client, Edge, serving_edge


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge(max_batch_size=2) as edge:
        yield edge


def ask(edge: Edge, request_id: str, **body: object) -> "asyncio.Task[httpx2.Response]":
    """Post a request under this `x-request-id` without waiting; await the returned task for the response."""
    sending = edge.data.post("/v1/images/generations", json={"prompt": "p kumquatfen", **body}, headers={"x-request-id": request_id})
    return asyncio.create_task(sending)


async def test_a_running_request_is_cancelled_by_its_id_and_its_rows_are_free_by_the_next_step(edge: Edge) -> None:
    edge.ranks.stepping.clear()
    running = ask(edge, "mine", n=2, num_inference_steps=100)
    await edge.wait_state(inFlight=2)
    waiting = ask(edge, "other")
    await edge.wait_state(queued=1)
    answer = await edge.data.delete("/v1/requests/mine")
    assert (answer.status_code, answer.content) == (204, b"")
    cancelled = await running
    assert (cancelled.status_code, cancelled.json()["error"]["code"], cancelled.json()["error"]["retryable"]) == (499, "Cancelled", False)
    assert cancelled.headers["x-request-id"] == "mine"
    edge.ranks.stepping.set()
    assert (await waiting).status_code == 200
    await edge.wait_state(inFlight=0, queued=0)


async def test_a_waiting_request_is_cancelled_at_once_without_a_step(edge: Edge) -> None:
    edge.ranks.stepping.clear()
    running = ask(edge, "a", n=2)
    await edge.wait_state(inFlight=2)
    waiting = ask(edge, "b")
    await edge.wait_state(queued=1)
    assert (await edge.data.delete("/v1/requests/b")).status_code == 204
    assert (await waiting).json()["error"]["code"] == "Cancelled"
    await edge.wait_state(queued=0, inFlight=2)
    edge.ranks.stepping.set()
    assert (await running).status_code == 200


async def test_a_request_that_is_unknown_or_answered_cannot_be_cancelled(edge: Edge) -> None:
    assert (await ask(edge, "done")).status_code == 200
    for request_id in ("done", "never", "a%20b"):
        answer = await edge.data.delete(f"/v1/requests/{request_id}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "NotFound")


async def test_requests_of_clients_that_chose_the_same_id_are_cancelled_together(edge: Edge) -> None:
    edge.ranks.stepping.clear()
    both = [ask(edge, "same") for _ in range(2)]
    await edge.wait_state(inFlight=2)
    assert (await edge.data.delete("/v1/requests/same")).status_code == 204
    assert [(await one).status_code for one in both] == [499, 499]


async def test_control_calls_are_answered_while_a_step_does_not_end(edge: Edge) -> None:
    edge.ranks.stepping.clear()
    running = ask(edge, "a")
    await edge.wait_state(inFlight=1)
    async with asyncio.timeout(DEADLINE_S):
        assert (await edge.state())["inFlight"] == 1
        assert (await edge.data.get("/v1/models")).status_code == 200
        assert (await edge.data.get("/healthz")).status_code == 200
        assert "diffusion_worker_requests_in_flight 1.0" in (await edge.data.get("/metrics")).text
        assert (await edge.put_adapter("stripes", "/loras/stripes")).status_code == 200
        assert (await edge.delete_adapter("stripes")).status_code == 200
    assert not running.done()
    edge.ranks.stepping.set()
    assert (await running).status_code == 200


async def test_an_image_that_was_out_of_memory_alone_is_refused_with_its_size_before_it_runs_again(edge: Edge) -> None:
    edge.ranks.out_of_memory_pixels = 512 * 512
    first = await edge.request_images(prompt="p kumquatfen", size="512x512")
    assert (first.status_code, first.json()["error"]["code"]) == (507, "InsufficientMemory")
    ticks = edge.engine.stats.ticks
    again = await edge.request_images(prompt="p kumquatfen", size="512x1024")
    assert (again.status_code, again.json()["error"]["code"]) == (400, "InvalidRequest")
    assert "found 512x1024" in again.json()["error"]["message"] and again.json()["error"]["param"] == "size"
    assert edge.engine.stats.ticks == ticks
    assert (await edge.request_images(prompt="p kumquatfen", size="256x256")).status_code == 200


async def test_an_id_of_another_replica_is_a_404_that_names_it(edge: Edge) -> None:
    drawn = (await edge.request_images(prompt="p kumquatfen")).headers
    own, digits = drawn["x-request-id"], "0" * 32
    others = dict.fromkeys((own, digits, f"a b.{digits}", "mine.1"))
    for request_id, replica in {f"digits-1-0.{digits}": "digits-1-0", **others}.items():
        answer = await edge.data.delete(f"/v1/requests/{request_id}")
        assert (answer.status_code, answer.json()["error"]["details"].get("replica")) == (404, replica), request_id
        assert answer.headers["x-replica"] == drawn["x-replica"]


async def test_a_request_is_cancelled_by_the_id_that_the_worker_drew_for_it(edge: Edge) -> None:
    edge.ranks.stepping.clear()
    stream = Client(edge.data_application, stream=True)
    head = await stream.message()
    [drawn] = [value.decode() for name, value in head["headers"] if name.lower() == b"x-request-id"]
    assert (await edge.data.delete(f"/v1/requests/{drawn}")).status_code == 204
    assert (await stream.event())["error"]["code"] == "Cancelled"
    edge.ranks.stepping.set()
    await stream.leave()


async def test_an_id_that_a_client_chose_is_its_own_among_those_of_other_keys(edge: Edge) -> None:
    edge.ranks.stepping.clear()
    keys = [{"authorization": f"Bearer {name}"} for name in ("first", "second")]
    asking = [
        asyncio.create_task(
            edge.data.post("/v1/images/generations", json={"prompt": "p kumquatfen"}, headers={**key, "x-request-id": "mine"})
        )
        for key in keys
    ]
    await edge.wait_state(inFlight=2)
    assert (await edge.data.delete("/v1/requests/mine")).status_code == 404
    assert (await edge.data.delete("/v1/requests/mine", headers=keys[0])).status_code == 204
    assert (await asking[0]).json()["error"]["code"] == "Cancelled"
    edge.ranks.stepping.set()
    assert (await asking[1]).status_code == 200
