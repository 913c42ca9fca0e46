# SPDX-License-Identifier: Apache-2.0
"""Streams of server-sent events: steps, previews, images, errors, signs of life, and clients that go away."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import ErrorReport, RequestSpec
from diffusion_worker.server.images import streaming
from diffusion_worker.server.schemas.answers import USAGE
from support.worker.fake_rank_group import fake_pixels, fake_preview
from support.worker.process import decode_image
from support.worker.server_edge import Client, Edge, serving_edge

SECRET = "a prompt that nobody else may read"
PROGRESS: dict[str, Any] = {"stream_options": {"include_progress": True}}


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge(max_batch_size=2) as edge:
        yield edge


def asking_for(edge: Edge, **body: Any) -> Client:
    """Return a client that has a streaming request and reads the answer's messages one by one."""
    return Client(edge.data_application, request_id="mine", **{"prompt": SECRET, "stream": True, **PROGRESS, **body})


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the data of each event in a stream's text, comments left out; assert that the event's type is the same in both places."""
    found = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        found.append(event)
    return found


async def test_a_stream_tells_each_step_then_the_image(edge: Edge) -> None:
    answer = await edge.request_images(prompt="p kumquatfen", seed=3, num_inference_steps=3, stream=True, **PROGRESS)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *steps, completed = events_of(answer.text)
    assert steps == [{"type": "image_generation.progress", "index": 0, "attempt": 1, "step": step, "steps": 3} for step in (1, 2, 3)]
    assert (completed["type"], completed["index"], completed["seed"]) == ("image_generation.completed", 0, 3)
    image = decode_image(completed["b64_json"])
    assert image.tobytes() == fake_pixels(RequestSpec(request_id="", prompt="p kumquatfen", seed=3, steps=3))
    assert completed["provenance"]["seed"] == 3
    assert "timings" not in completed


async def test_a_completed_event_has_the_fields_of_the_sdk_and_what_was_asked_for(edge: Edge) -> None:
    answer = await edge.request_images(
        prompt="p kumquatfen", stream=True, timings=True, output_format="webp", output_compression=80, size="48x32"
    )
    completed = events_of(answer.text)[-1]
    expected = {"background": "opaque", "output_format": "webp", "quality": "high", "size": "48x32", "usage": USAGE}
    assert {name: completed[name] for name in expected} == expected
    assert isinstance(completed["created_at"], int)
    assert decode_image(completed["b64_json"]).format == "WEBP"
    assert completed["timings"]["denoise"] > 0


async def test_without_being_asked_for_our_own_events_are_comments_that_keep_the_connection(edge: Edge) -> None:
    answer = await edge.request_images(prompt="p kumquatfen", num_inference_steps=6, stream=True, partial_images=2)
    assert [event["type"] for event in events_of(answer.text)] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert answer.text.count(": keep-alive\n\n") == 6, "one in place of each step"


async def test_previews_come_on_request_between_the_steps(edge: Edge) -> None:
    answer = await edge.request_images(
        prompt="p kumquatfen", seed=3, num_inference_steps=6, stream=True, partial_images=2, output_format="png", **PROGRESS
    )
    events = events_of(answer.text)
    assert [event["type"].rpartition(".")[2] for event in events] == [
        *("progress", "progress", "partial_image", "progress", "progress", "partial_image", "progress", "progress", "completed")
    ]
    previews = [event for event in events if event["type"] == "image_generation.partial_image"]
    spec = RequestSpec(request_id="", prompt="p kumquatfen", seed=3, steps=6)
    for number, event in enumerate(previews):
        assert (event["partial_image_index"], event["index"], event["size"], event["quality"]) == (number, 0, "64x64", "high")
        assert decode_image(event["b64_json"]).tobytes() == fake_preview(spec, number)


async def test_several_images_are_streamed_side_by_side_each_with_its_index(edge: Edge) -> None:
    answer = await edge.request_images(prompt="p kumquatfen", seed=3, n=2, num_inference_steps=2, stream=True, partial_images=1, **PROGRESS)
    events = events_of(answer.text)
    for index in (0, 1):
        own = [event for event in events if event["index"] == index]
        assert [event["type"].rpartition(".")[2] for event in own] == ["progress", "partial_image", "progress", "completed"]
        assert own[-1]["seed"] == 3 + index


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"num_inference_steps": 201}, 400, "InvalidRequest"),
        ({"model": "nobody"}, 404, "model_not_found"),
        ({"prompt": ""}, 400, "InvalidRequest"),
    ],
)
async def test_a_request_that_is_refused_is_answered_with_its_status_and_no_stream(
    edge: Edge, body: dict[str, Any], status: int, code: str
) -> None:
    answer = await edge.request_images(**{"prompt": "p kumquatfen", "stream": True, **body})
    assert (answer.status_code, answer.headers["content-type"], answer.json()["error"]["code"]) == (status, "application/json", code)


async def test_an_error_in_a_stream_is_its_last_event_with_the_body_of_all_errors(edge: Edge) -> None:
    edge.ranks.stepping.clear()
    asking = asking_for(edge)
    await edge.wait_state(inFlight=1)
    edge.ranks.stepping.set()
    assert (await asking.message())["status"] == 200
    edge.ranks.stepping.clear()
    assert events_of(await asking.body())[0]["step"] == 1
    assert (await edge.data.delete("/v1/requests/mine")).status_code == 204
    rest = ""
    while (message := await asking.message())["more_body"]:
        rest += message["body"].decode()
    [error] = [event for event in events_of(rest + message["body"].decode()) if event["type"] == "error"]
    assert error["error"] == {
        "message": "the request was cancelled by DELETE /v1/requests",
        "type": "invalid_request_error",
        "param": None,
        "code": "Cancelled",
        "retryable": False,
        "retry_after_seconds": None,
        "details": {},
    }
    await asking.end()
    assert 'code="Cancelled"' in (await edge.data.get("/metrics")).text
    await edge.wait_state(inFlight=0, queued=0)


async def test_ranks_that_are_lost_for_good_end_a_stream_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "FIRST_WORD_S", 0.01)
    async with serving_edge(max_restarts=0) as edge:
        edge.ranks.stepping.clear()
        asking = asking_for(edge)
        assert (await asking.message())["status"] == 200
        edge.ranks.lose("rank 0 was ended by SIGKILL")
        text = ""
        while (message := await asking.message())["more_body"]:
            text += message["body"].decode()
        error = events_of(text)[-1]
        assert (error["type"], error["error"]["code"], error["error"]["retryable"]) == ("error", "EngineFailed", True)
        assert "SIGKILL" in error["error"]["message"]
        await asking.end()


async def test_a_fault_of_ours_in_a_stream_is_an_event_without_its_details(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> bytes:
        raise ZeroDivisionError("what only the log may hold")

    monkeypatch.setattr(streaming, "completed_event", broken)
    answer = await edge.request_images(prompt=SECRET, stream=True)
    last = events_of(answer.text)[-1]
    assert (last["type"], last["error"]["code"]) == ("error", "EngineFailed")
    assert "what only the log may hold" not in answer.text and "what only the log may hold" in caplog.text
    assert SECRET not in caplog.text


async def test_a_request_in_the_queue_has_its_stream_soon_and_signs_of_life(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "FIRST_WORD_S", 0.01)
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.01)
    edge.ranks.stepping.clear()
    running = asyncio.create_task(edge.request_images(prompt="p kumquatfen", n=2))
    await edge.wait_state(inFlight=2)
    asking = asking_for(edge)
    assert (await asking.message())["status"] == 200
    assert [await asking.body() for _ in range(3)] == [": keep-alive\n\n"] * 3
    assert (await edge.state())["queued"] == 1
    edge.ranks.stepping.set()
    text = ""
    while (message := await asking.message())["more_body"]:
        text += message["body"].decode()
    assert events_of(text)[-1]["type"] == "image_generation.completed"
    await asking.end()
    assert (await running).status_code == 200


async def a_rare_adapter(edge: Edge) -> None:
    """Declare the OnDemand adapter `rare` on the control port; its fetch, once a request names it, waits for `edge.fetcher.arriving`."""
    edge.fetcher.arriving.clear()
    source = {"huggingFace": {"repo": "org/rare"}}
    call = {"operationId": "1", "source": source, "residency": "OnDemand"}
    assert (await edge.control.put("/v1/adapters/rare", json=call)).status_code == 200


async def test_a_request_whose_adapter_is_being_fetched_has_its_stream_soon_and_signs_of_life(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "FIRST_WORD_S", 0.01)
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.01)
    await a_rare_adapter(edge)
    asking = asking_for(edge, model="rare")
    assert (await asking.message())["status"] == 200
    assert [await asking.body() for _ in range(3)] == [": keep-alive\n\n"] * 3
    [adapter] = (await edge.wait_state(queued=1))["adapters"]
    assert (adapter["state"], adapter["fetchedBytes"], adapter["totalBytes"]) == ("Fetching", 2048, 4096)
    edge.fetcher.arriving.set()
    text = ""
    while (message := await asking.message())["more_body"]:
        text += message["body"].decode()
    completed = events_of(text)[-1]
    assert completed["type"] == "image_generation.completed"
    assert [adapter["name"] for adapter in completed["provenance"]["adapters"]] == ["rare"]
    await asking.end()


async def test_a_client_that_leaves_while_its_adapter_is_fetched_frees_its_place(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "FIRST_WORD_S", 0.01)
    await a_rare_adapter(edge)
    asking = asking_for(edge, model="rare")
    assert (await asking.message())["status"] == 200
    await edge.wait_state(queued=1)
    asking.gone.set()
    await asking.end()
    [adapter] = (await edge.wait_state(inFlight=0, queued=0))["adapters"]
    assert adapter["refs"] == 0


async def test_an_adapter_that_cannot_be_had_ends_the_stream_that_waits_for_it_with_the_reason(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "FIRST_WORD_S", 0.01)
    await a_rare_adapter(edge)
    edge.ranks.adapter_errors["/cache/org/rare"] = ErrorReport(ErrorCode.NO_MATCHING_MODULES, "made for another model")
    asking = asking_for(edge, model="rare")
    assert (await asking.message())["status"] == 200
    edge.fetcher.arriving.set()
    text = ""
    while (message := await asking.message())["more_body"]:
        text += message["body"].decode()
    error = events_of(text)[-1]["error"]
    assert (error["code"], error["details"]) == ("AdapterNotLoaded", {"code": "NoMatchingModules"})
    assert "made for another model" in error["message"]
    await asking.end()


@pytest.mark.parametrize("steps_taken", [0, 1])
async def test_a_client_that_leaves_its_stream_frees_its_place(edge: Edge, steps_taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "FIRST_WORD_S", 0.01)
    edge.ranks.stepping.clear()
    asking = asking_for(edge, n=2)
    await edge.wait_state(inFlight=2)
    assert (await asking.message())["status"] == 200
    if steps_taken:
        edge.ranks.stepping.set()
        while not events_of(await asking.body()):
            pass
        edge.ranks.stepping.clear()
    asking.gone.set()
    await asking.end()
    edge.ranks.stepping.set()
    await edge.wait_state(inFlight=0, queued=0)
    assert 'code="ClientGone"' in (await edge.data.get("/metrics")).text


async def test_a_client_that_reads_nothing_is_gone_after_a_time(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SEND_TIMEOUT_S", 0.02)
    asking = asking_for(edge)
    asking.reading.clear()
    await asking.end()
    await edge.wait_state(inFlight=0, queued=0)
    assert 'code="ClientGone"' in (await edge.data.get("/metrics")).text


async def test_an_error_that_nobody_reads_ends_the_stream_all_the_same(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SEND_TIMEOUT_S", 0.02)
    edge.ranks.stepping.clear()
    monkeypatch.setattr(streaming, "FIRST_WORD_S", 0.01)
    asking = asking_for(edge)
    assert (await asking.message())["status"] == 200
    asking.reading.clear()
    edge.engine._steps.end(RequestError(ErrorCode.RANK_FAILED, "rank 0 is gone"))
    await asking.end()
    edge.ranks.stepping.set()
    await edge.wait_state(inFlight=0, queued=0)


async def test_no_task_is_left_of_a_stream_however_it_ended(edge: Edge) -> None:
    before = asyncio.all_tasks()
    await edge.request_images(prompt="p kumquatfen", stream=True)
    await edge.request_images(prompt="", stream=True)
    asking = asking_for(edge)
    await asking.message()
    asking.gone.set()
    await asking.end()
    await edge.wait_state(inFlight=0, queued=0)
    await edge.wait_tasks(before)
