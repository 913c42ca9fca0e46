# SPDX-License-Identifier: Apache-2.0
"""Streams of held requests: they begin at once, and report the reason of the wait until the image is made."""

import asyncio
from pathlib import Path

import pytest

from diffusion_worker.engine.requests import holding
from diffusion_worker.engine.sleep import calls as sleep_calls
from diffusion_worker.errors import ErrorCode
from diffusion_worker.messages import ErrorReport
from diffusion_worker.server.images import streaming
from support.worker.server_edge import Client, Edge, code, serving_edge, sleeping_edge
from support.worker.sleep_rig import write_desired


async def test_a_held_stream_begins_at_once_and_tells_where_it_stands_until_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.01)
    monkeypatch.setattr(holding, "LOOK_S", 0.02)
    async with sleeping_edge(tmp_path) as edge:
        before = asyncio.create_task(edge.request_images(prompt="before kumquatfen"))
        await edge.wait_held(1)
        client = _stream(edge)
        assert (await client.message())["status"] == 200
        held = {"type": "image_generation.held", "state": "waking", "ahead": 1}
        assert await client.event() == held
        while await client.body() != ": keep-alive\n\n":
            pass
        before.cancel()
        assert await client.event() == held | {"ahead": 0}
        edge.ranks.calling.set()
        assert [(await client.event())["type"] for _ in range(3)] == [
            "image_generation.progress",
            "image_generation.progress",
            "image_generation.completed",
        ]
        await client.end()


async def test_a_stream_tells_of_every_state_that_it_waits_through(tmp_path: Path) -> None:
    async with serving_edge(desired_path=write_desired(tmp_path, "OnIdle")) as edge:
        edge.ranks.calling.clear()
        await edge.operate("sleep")
        await edge.wait_state(state="sleeping")
        client = _stream(edge)
        assert (await client.message())["status"] == 200
        assert (await client.event())["state"] == "sleeping"
        edge.ranks.calling.set()
        states = []
        while (event := await client.event())["type"] == "image_generation.held":
            states.append(event["state"])
        assert states[-1] == "waking"
        assert event["type"] == "image_generation.progress"


async def test_a_held_stream_that_waits_too_long_ends_with_an_error_event(tmp_path: Path) -> None:
    async with sleeping_edge(tmp_path, holdTimeoutSeconds=0.05) as edge:
        client = _stream(edge)
        assert (await client.message())["status"] == 200
        while (event := await client.event())["type"] != "error":
            assert event["type"] == "image_generation.held"
        assert (event["error"]["code"], event["error"]["retryable"]) == ("Busy", True)
        assert event["error"]["retry_after_seconds"] > 0
        edge.ranks.calling.set()


async def test_a_request_that_is_refused_instead_of_held_has_its_status_and_no_stream(tmp_path: Path) -> None:
    async with sleeping_edge(tmp_path, maxHeld=0) as edge:
        answer = await edge.request_images(prompt="p kumquatfen", stream=True)
        assert (code(answer), answer.headers["content-type"]) == ((429, "Overloaded"), "application/json")
        edge.ranks.calling.set()


async def test_a_model_without_the_memory_to_wake_keeps_its_requests_until_it_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleep_calls, "FIRST_RETRY_S", 0.01)
    async with sleeping_edge(tmp_path) as edge:
        edge.ranks.wake_errors += [ErrorReport(ErrorCode.INSUFFICIENT_MEMORY, "too little")] * 2
        edge.ranks.calling.set()
        client = _stream(edge)
        answers = await asyncio.gather(*(edge.request_images(prompt="p kumquatfen") for _ in range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3
        states = []
        assert (await client.message())["status"] == 200
        while (event := await client.event())["type"] == "image_generation.held":
            states.append(event["state"])
        assert {"asleep", "waking"} <= set(states) and event["type"] == "image_generation.progress"


def _stream(edge: Edge) -> Client:
    return Client(edge.data_application, stream=True, stream_options={"include_progress": True}, num_inference_steps=2)
