# SPDX-License-Identifier: Apache-2.0
"""The data port over a fake rank group: images, refusals, and details that stay out of answers and logs."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from diffusion_worker.engine.state.state_document import EngineState
from diffusion_worker.messages import RequestSpec
from diffusion_worker.server.app import MAX_BODY_BYTES
from support.worker.fake_rank_group import fake_pixels
from support.worker.process import decode_image
from support.worker.server_edge import Client, Edge, serving_edge

SECRET = "a prompt that nobody else may read"


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge(max_batch_size=2) as edge:
        yield edge


async def test_a_request_is_answered_as_the_openai_sdk_expects(edge: Edge) -> None:
    answer = await edge.request_images(
        prompt="a red seven kumquatfen", model="digits", n=2, size="48x32", seed=7, response_format="b64_json"
    )
    assert answer.status_code == 200
    body = answer.json()
    assert isinstance(body["created"], int)
    assert [item["seed"] for item in body["data"]] == [7, 8]
    for seed, item in zip((7, 8), body["data"], strict=True):
        image = decode_image(item["b64_json"])
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (48, 32))
        expected = fake_pixels(RequestSpec(request_id="", prompt="a red seven kumquatfen", seed=seed, width=48, height=32))
        assert image.tobytes() == expected


async def test_a_request_without_a_model_a_size_or_a_seed_gets_the_defaults(edge: Edge) -> None:
    answer = await edge.request_images(prompt="a red seven kumquatfen", size="auto")
    [item] = answer.json()["data"]
    again = await edge.request_images(prompt="a red seven kumquatfen", seed=item["seed"])
    assert decode_image(item["b64_json"]).size == (64, 64)
    assert again.json()["data"] == [item]


async def test_parameters_of_diffusion_reach_the_pipeline(edge: Edge) -> None:
    body = {"prompt": "p kumquatfen", "seed": 1, "num_inference_steps": 3, "guidance_scale": 2.5, "negative_prompt": "blur kumquatfen"}
    answer = await edge.request_images(**body)
    spec = RequestSpec(request_id="", prompt="p kumquatfen", seed=1, steps=3, guidance_scale=2.5, negative_prompt="blur kumquatfen")
    assert decode_image(answer.json()["data"][0]["b64_json"]).tobytes() == fake_pixels(spec)


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({}, "prompt", "required"),
        ({"prompt": ""}, "prompt", "0 characters"),
        ({"prompt": "   "}, "prompt", "an empty one"),
        ({"prompt": None}, "prompt", "null"),
        ({"prompt": 5}, "prompt", "found 5"),
        ({"prompt": [SECRET]}, "prompt", "a list"),
        ({"prompt": SECRET * 1000}, "prompt", "8192 characters"),
        ({"prompt": "p kumquatfen", "negative_prompt": 1}, "negative_prompt", "found 1"),
        ({"prompt": "p kumquatfen", "usr": "somebody"}, "usr", "unknown field"),
        ({"prompt": "p kumquatfen", "quality": "best"}, "quality", "'auto'"),
        ({"prompt": "p kumquatfen", "n": 0}, "n", "found 0"),
        ({"prompt": "p kumquatfen", "n": 11}, "n", "1 to 10"),
        ({"prompt": "p kumquatfen", "n": "2"}, "n", "found '2'"),
        ({"prompt": "p kumquatfen", "n": True}, "n", "found true"),
        ({"prompt": "p kumquatfen", "n": 1.5}, "n", "found 1.5"),
        ({"prompt": "p kumquatfen", "size": "64"}, "size", "WIDTHxHEIGHT"),
        ({"prompt": "p kumquatfen", "size": "64x64\n"}, "size", "WIDTHxHEIGHT"),
        ({"prompt": "p kumquatfen", "size": "0x64"}, "size", "WIDTHxHEIGHT"),
        ({"prompt": "p kumquatfen", "size": "-8x64"}, "size", "WIDTHxHEIGHT"),
        ({"prompt": "p kumquatfen", "size": "64x65"}, "size", "multiples of 8"),
        ({"prompt": "p kumquatfen", "size": "99992x99992"}, "size", "pixels"),
        ({"prompt": "p kumquatfen", "seed": -2}, "seed", "found -2"),
        ({"prompt": "p kumquatfen", "seed": 2**63}, "seed", "9223372036854775807"),
        ({"prompt": "p kumquatfen", "seed": 10**400}, "seed", "bits"),
        ({"prompt": "p kumquatfen", "seed": 1.5}, "seed", "found 1.5"),
        ({"prompt": "p kumquatfen", "num_inference_steps": 0}, "num_inference_steps", "found 0"),
        ({"prompt": "p kumquatfen", "num_inference_steps": 201}, "num_inference_steps", "1 to 200"),
        ({"prompt": "p kumquatfen", "guidance_scale": -0.5}, "guidance_scale", "found -0.5"),
        ({"prompt": "p kumquatfen", "guidance_scale": 1e6}, "guidance_scale", "0 to 100"),
        ({"prompt": "p kumquatfen", "guidance_scale": "7"}, "guidance_scale", "found '7'"),
        ({"prompt": "p kumquatfen", "response_format": "link"}, "response_format", "'b64_json'"),
        ({"prompt": "p kumquatfen", "model": 7}, "model", "found 7"),
        ({"prompt": "p kumquatfen", "x" * 5000: 1}, "x" * 80 + "…", "unknown field"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(edge: Edge, body: dict[str, Any], field: str, says: str) -> None:
    answer = await edge.request_images(**body)
    assert answer.status_code == 400
    problem = answer.json()["error"]
    assert (problem["code"], problem["retryable"], problem["retry_after_seconds"]) == ("InvalidRequest", False, None)
    assert (problem["type"], problem["param"], problem["details"]) == ("invalid_request_error", field, {})
    assert field in problem["message"] and says in problem["message"]
    assert SECRET not in answer.text and len(answer.text) < 600


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_numbers_that_are_none_are_refused(edge: Edge, number: str) -> None:
    answer = await edge.data.post(
        "/v1/images/generations",
        content=f'{{"prompt": "p kumquatfen", "guidance_scale": {number}}}',
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "guidance_scale"


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"null", b"[]", b'"p"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": "p kumquatfen", "n": ' + b"9" * 5000 + b"}", b"{} {}"],
)
async def test_a_body_that_is_no_json_object_is_refused(edge: Edge, content: bytes) -> None:
    answer = await edge.data.post("/v1/images/generations", content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "InvalidRequest")
    assert "body" in answer.json()["error"]["message"]


async def test_a_form_is_refused_with_what_is_expected(edge: Edge) -> None:
    answer = await edge.data.post("/v1/images/generations", data={"prompt": "p kumquatfen"})
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]


async def test_a_body_over_the_limit_is_refused_whether_its_length_is_declared_or_not(edge: Edge) -> None:
    content = b'{"prompt": "' + b"p" * MAX_BODY_BYTES + b'"}'

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 65536):
            yield content[start : start + 65536]

    headers = {"content-type": "application/json"}
    for body in (content, chunks()):
        answer = await edge.data.post("/v1/images/generations", content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "InvalidRequest")
        assert str(MAX_BODY_BYTES) in answer.json()["error"]["message"]


async def test_an_unknown_model_is_not_found_and_never_the_base(edge: Edge) -> None:
    answer = await edge.request_images(prompt="p kumquatfen", model="nobody")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "'nobody'" in answer.json()["error"]["message"]


async def test_a_group_that_is_lost_for_good_fails_the_requests_that_wait_for_it() -> None:
    async with serving_edge(max_restarts=0) as edge:
        edge.ranks.stepping.clear()
        watching = asyncio.create_task(edge.engine.run_until_failure())
        request = asyncio.create_task(edge.request_images(prompt="p kumquatfen"))
        await edge.wait_state(inFlight=1)
        edge.ranks.lose("rank 0 was ended by SIGKILL")
        answer = await request
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "EngineFailed")
        assert "SIGKILL" in answer.json()["error"]["message"]
        assert "SIGKILL" in await watching
        assert (await edge.request_images(prompt="p kumquatfen")).status_code == 500
        assert (await edge.data.get("/readyz")).status_code == 503


async def test_a_client_that_goes_away_frees_its_place_in_the_batch(edge: Edge) -> None:
    edge.ranks.stepping.clear()
    leaving = Client(edge.data_application, n=2)
    await edge.wait_state(inFlight=2)
    staying = asyncio.create_task(edge.request_images(prompt="p kumquatfen"))
    await edge.wait_state(queued=1)
    await leaving.leave()
    edge.ranks.stepping.set()
    assert (await staying).status_code == 200
    await edge.wait_state(inFlight=0, queued=0)


async def test_every_answer_has_a_request_id_and_a_harmless_one_of_the_client_is_kept(edge: Edge) -> None:
    own = await edge.data.post("/v1/images/generations", json={"prompt": "p kumquatfen"}, headers={"x-request-id": "client-7"})
    evil = await edge.data.get("/healthz", headers={"x-request-id": "a b; c" * 100})
    assert own.headers["x-request-id"] == "client-7"
    replica = evil.headers["x-replica"]
    assert re.fullmatch(re.escape(replica) + r"\.[0-9a-f]{32}", evil.headers["x-request-id"])
    for path in ("/nothing", "/metrics", "/v1/models/none"):
        assert (await edge.data.get(path)).headers["x-replica"] == replica
    assert (await edge.data.get("/nothing")).headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/nothing", 404, "NotFound"), ("GET", "/v1/state", 404, "NotFound"), ("GET", "/v1/images/generations", 405, "InvalidRequest")],
)
async def test_a_wrong_route_is_answered_in_the_same_form(edge: Edge, method: str, path: str, status: int, code: str) -> None:
    answer = await edge.data.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert path in answer.json()["error"]["message"]


async def test_a_fault_of_ours_is_an_engine_failure_without_its_details(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError(SECRET)

    monkeypatch.setattr(edge.engine, "generate", broken)
    answer = await edge.request_images(prompt="p kumquatfen")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "EngineFailed")
    assert SECRET not in answer.text


async def test_no_prompt_is_logged(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    await edge.request_images(prompt=SECRET)
    await edge.request_images(prompt=SECRET, n=0)
    assert "image request" in caplog.text
    assert SECRET not in caplog.text


def test_states_of_the_engine_are_the_documented_ones() -> None:
    assert [state.value for state in EngineState] == [
        "starting", "ready", "draining", "sleeping", "asleep", "waking", "restarting", "failed", "terminating",
    ]  # fmt: skip
