# SPDX-License-Identifier: Apache-2.0
"""Errors of the data port: OpenAI's form, the right status, and `x-should-retry` on each; errors of the control port stay flat."""

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from starlette.requests import Request

from diffusion_worker.errors import STATUS, ErrorCode, RequestError
from diffusion_worker.server.schemas.problems import REQUEST_ID, error_answer
from support.worker.server_edge import Edge, serving_edge

# Error statuses that the SDKs of OpenAI and Vercel retry by themselves.
REPEATED = {408, 409, 429, *range(500, 600)}


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge() as edge:
        yield edge


def request_of(edge: Edge) -> Request:
    return Request({"type": "http", "headers": [], "app": edge.data_application, "state": {"request_id": "the-id"}})


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("code", list(ErrorCode))
async def test_clients_repeat_an_error_by_its_status_exactly_where_it_may_pass(edge: Edge, code: ErrorCode, lasting: bool) -> None:
    error = RequestError(code, "why", retry_after_s=2.0, lasting=lasting)
    answer = error_answer(error, request_of(edge))
    assert (answer.status_code in REPEATED) == error.retryable
    assert answer.headers["x-should-retry"] == ("true" if error.retryable else "false")
    assert ("retry-after" in answer.headers) == error.retryable
    assert answer.headers[REQUEST_ID] == "the-id"


def the_error(answer: httpx2.Response) -> dict[str, Any]:
    """Return the error of an answer; assert that it has all fields in OpenAI's form, and headers that agree."""
    assert list(answer.json()) == ["error"]
    error: dict[str, Any] = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code", "retryable", "retry_after_seconds", "details"]
    assert error["message"] and answer.headers["x-should-retry"] == str(error["retryable"]).lower()
    assert answer.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("method", "path", "content", "expected"),
    [
        ("GET", "/nowhere", b"", (404, "NotFound", "invalid_request_error", None)),
        ("GET", "/v1/models/nobody", b"", (404, "model_not_found", "invalid_request_error", "model")),
        ("PUT", "/v1/images/generations", b"", (405, "InvalidRequest", "invalid_request_error", None)),
        ("POST", "/v1/images/generations", b"{", (400, "InvalidRequest", "invalid_request_error", "body")),
        ("POST", "/v1/images/generations", b'{"prompt": 7}', (400, "InvalidRequest", "invalid_request_error", "prompt")),
        ("POST", "/v1/images/generations", b'"' + b"x" * 2_000_000, (413, "InvalidRequest", "invalid_request_error", "body")),
        ("POST", "/v1/images/edits", b"no form", (400, "InvalidRequest", "invalid_request_error", "body")),
        ("DELETE", "/v1/requests/nothing", b"", (404, "NotFound", "invalid_request_error", None)),
    ],
)
async def test_every_refusal_has_the_one_form(
    edge: Edge, method: str, path: str, content: bytes, expected: tuple[int, str, str, str | None]
) -> None:
    answer = await edge.data.request(method, path, content=content, headers={"Content-Type": "application/json"})
    error = the_error(answer)
    assert (answer.status_code, error["code"], error["type"], error["param"]) == expected, error
    assert answer.headers["x-should-retry"] == "false"


async def test_a_fault_of_ours_has_the_form_and_the_id_of_its_request(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("what only the log may hold")

    monkeypatch.setattr(edge.engine, "generate", broken)
    answer = await edge.data.post("/v1/images/generations", json={"prompt": "p kumquatfen"}, headers={"X-Request-ID": "mine"})
    error = the_error(answer)
    assert (answer.status_code, error["code"], error["type"]) == (500, "EngineFailed", "server_error")
    assert answer.headers["x-request-id"] == "mine" and "only the log" not in answer.text


async def test_errors_of_the_control_port_are_flat(edge: Edge) -> None:
    for answer in (await edge.control.get("/nowhere"), await edge.operate("sleep", deadlineSeconds="soon")):
        assert set(answer.json()) == {"code", "message", "retryable", "retryAfterSeconds", "details"}
        assert "x-should-retry" not in answer.headers


def test_a_code_that_a_request_meets_has_the_status_of_its_kind() -> None:
    assert (STATUS[ErrorCode.REQUEST_FAILED], STATUS[ErrorCode.ENGINE_FAILED], STATUS[ErrorCode.OVERLOADED]) == (422, 500, 429)
