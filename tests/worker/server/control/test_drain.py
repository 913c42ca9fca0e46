# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/drain`: new requests are refused, running ones are answered, and held ones are refused at once."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from support.worker.server_edge import Edge, code, serving_edge, sleeping_edge
from support.worker.sleep_rig import KILLED


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge() as made:
        yield made


async def asked(edge: Edge) -> "asyncio.Task[httpx2.Response]":
    """Send a request whose first step lasts until `edge.ranks.stepping` is set; return its task once it runs."""
    edge.ranks.stepping.clear()
    task = asyncio.create_task(edge.request_images(prompt="p kumquatfen"))
    await edge.wait_state(inFlight=1)
    return task


async def test_what_runs_is_answered_and_what_comes_is_refused(edge: Edge) -> None:
    assert (await edge.state())["draining"] is False
    task = await asked(edge)
    answer = await edge.operate("drain", operationId="d")
    assert (answer.status_code, answer.json()) == (202, {"operationId": "d", "state": "terminating"})
    refused = await edge.request_images(prompt="q kumquatfen")
    assert code(refused) == (503, "Terminating")
    assert refused.headers["retry-after"] == "1"
    assert (await edge.data.get("/readyz")).status_code == 503
    edge.ranks.stepping.set()
    assert (await task).status_code == 200
    assert (await edge.wait_state(inFlight=0, queued=0, draining=True))["state"] == "terminating"


async def test_a_second_call_changes_nothing_and_another_boots_call_is_refused(edge: Edge) -> None:
    assert (await edge.operate("drain", bootId="another")).json()["code"] == "WrongBoot"
    assert (await edge.state())["state"] == "ready"
    task = await asked(edge)
    await edge.operate("drain", deadlineSeconds=100)
    assert (await edge.operate("drain", deadlineSeconds=0.01)).status_code == 202
    edge.ranks.stepping.set()
    assert (await task).status_code == 200


async def test_requests_that_outlast_the_deadline_end_with_a_code_that_may_be_tried_again(edge: Edge) -> None:
    task = await asked(edge)
    await edge.operate("drain", deadlineSeconds=0.05)
    assert code(await task) == (503, "Terminating")
    edge.ranks.stepping.set()
    await edge.wait_state(inFlight=0)


async def test_held_requests_are_refused_at_once(tmp_path: Path) -> None:
    async with sleeping_edge(tmp_path) as edge:
        held = asyncio.create_task(edge.request_images(prompt="p kumquatfen"))
        await edge.wait_held(1)
        assert (await edge.operate("drain")).status_code == 202
        answer = await held
        assert code(answer) == (503, "Terminating")
        assert answer.headers["retry-after"] == "1"
        edge.ranks.calling.set()


async def test_a_pause_and_a_sleep_that_drains_hold_up_no_drain(edge: Edge) -> None:
    task = await asked(edge)
    await edge.operate("sleep")
    await edge.wait_state(state="draining")
    await edge.operate("drain")
    edge.ranks.stepping.set()
    assert (await task).status_code == 200


async def test_ranks_that_are_lost_while_they_drain_make_the_request_again(edge: Edge) -> None:
    task = await asked(edge)
    await edge.operate("drain")
    edge.ranks.lose(KILLED)
    edge.ranks.stepping.set()
    assert (await task).status_code == 200


async def test_the_end_of_the_process_after_a_drain_waits_for_nothing(edge: Edge) -> None:
    await edge.operate("drain")
    async with asyncio.timeout(30):
        await edge.engine.terminate()
    assert edge.ranks.stopped
