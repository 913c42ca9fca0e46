# SPDX-License-Identifier: Apache-2.0
"""Errors as clients' SDKs raise them, on a real worker process: class, message, code, and repetitions.

The SDKs are OpenAI's for Python, JavaScript and Go, and Vercel's with both of its packages for such a server. Tools of LangChain and
LlamaIndex, which send fields of their own, make images too. A repetition is counted at
the worker, which logs each image request once.
"""

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from support.sample import WHOLE
from support.worker.process import DIGITS, FAKE_PROGRAM, WorkerProcess
from tools import client_sdks
from tools.devcluster.errors import PrerequisiteMissing

# The tests start a worker, and a process for each call of another language. A repetition waits half a second, Vercel's two. The program in
# Go is built once, which takes minutes on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KEY = "sk-of-the-worker"
SDKS = Path(__file__).parents[2] / "support" / "sdks"
RETRIES = 1
OF_STATUS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    503: "InternalServerError",
}

Given = Mapping[str, Any]
Found = Mapping[str, Any]
Calls = Callable[..., Found]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """Start the HTTP server over fake ranks for the module; clients need a key, and a step takes 10 ms.

    A put of the adapter `bad` has failed with status 400.
    """
    folder = tmp_path_factory.mktemp("worker")
    key_path = folder / "key"
    key_path.write_text(KEY)
    adapter = folder / "broken"
    adapter.mkdir()
    env = {"FAKE_WORKER": json.dumps({"stepSeconds": 0.01})}
    options = (f"--api-key-file={key_path}",)
    with WorkerProcess(program=FAKE_PROGRAM, env=env, options=options) as worker:
        worker.wait_ready()
        assert worker.put_adapter("bad", adapter).status_code == 400
        yield worker


def by_python(given: Given) -> Found:
    body, images = given["body"], 0
    streams = bool(body.get("stream"))
    with OpenAI(base_url=given["baseURL"], api_key=given["apiKey"], max_retries=given["maxRetries"], timeout=60) as client:
        try:
            answer: Any = client.post(
                "/images/generations", cast_to=object, body=body, options={"headers": given["headers"]},
                stream=streams, stream_cls=openai.Stream[Any],
            )  # fmt: skip
            for number, event in enumerate(answer if streams else ()):
                if given["cancel"] and number == 0:
                    client.delete(f"/requests/{given['cancel']}", cast_to=type(None))
                images += event["type"] == "image_generation.completed"
        except openai.APIError as error:
            status, request_id = getattr(error, "status_code", None), getattr(error, "request_id", None)
            found = {"code": error.code, "type": error.type, "param": error.param, "status": status, "requestID": request_id}
            return {"raised": type(error).__name__, "message": str(error), **found}
    return {"raised": None, "images": images if streams else len(answer["data"])}


def by_program(command: list[str], given: Given, **env: str) -> Found:
    """Run a program of `support/sdks` with this input as JSON, and return the JSON that it prints; it must end with 0."""
    ended = subprocess.run(
        command, input=json.dumps(given), env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found: Found = json.loads(ended.stdout)
    return found


def by_javascript(given: Given) -> Found:
    return by_program(["node", str(SDKS / "openai.mjs")], given, SDKS=str(client_sdks.javascript()))


def by_go(given: Given) -> Found:
    return by_program([str(client_sdks.go(SDKS / "go"))], given)


def by_vercel(given: Given, package: str = "@ai-sdk/openai") -> Found:
    return by_program(["node", str(SDKS / "vercel.mjs"), package], given, SDKS=str(client_sdks.javascript()))


def by_vercel_compatible(given: Given) -> Found:
    return by_vercel(given, "@ai-sdk/openai-compatible")


def by_langchain(given: Given) -> Found:
    return by_program(["node", str(SDKS / "langchain.mjs")], given, SDKS=str(client_sdks.javascript()))


def by_llama_index(given: Given) -> Found:
    env = {"PYTHONPATH": str(client_sdks.llama_index()), "OPENAI_BASE_URL": given["baseURL"], "OPENAI_API_KEY": given["apiKey"]}
    return by_program([sys.executable, "-S", str(SDKS / "llama_index_tool.py")], given, **env)


# The program in Go is built first, so `make soak` has it.
THAT_STREAM = {"python": by_python, "javascript": by_javascript} | ({"go": by_go} if WHOLE else {})
ALL = {**THAT_STREAM, "vercel": by_vercel, "vercel-compatible": by_vercel_compatible}


def class_of(client: str, status: int, seen: int) -> str:
    """Return the expected class of the error that a client raises for this status, after the worker has seen this many tries."""
    if client == "go":
        return "openai.Error"
    if client in THAT_STREAM:
        return OF_STATUS[status]
    return "AI_RetryError" if seen > 1 else "AI_APICallError"


class Client:
    """A client SDK, by its name, and the worker that it calls."""

    def __init__(self, name: str, worker: WorkerProcess) -> None:
        self.name, self._worker = name, worker

    def ask(self, *, seen: int = 1, key: str = KEY, cancels: bool = False, origin: str | None = None, **wanted: Any) -> Found:
        """Make a call by the SDK, and check that the worker sees it `seen` times; return the raised error, or the number of images.

        The test is skipped if the SDK is not there.
        """
        request_id = uuid.uuid4().hex
        given = {"baseURL": f"{self._worker.url}/v1", "apiKey": key, "maxRetries": RETRIES, "cancel": request_id if cancels else ""}
        given |= {
            "headers": {"X-Request-ID": request_id, **({"Origin": origin} if origin else {})},
            "body": {"prompt": "a red seven kumquatfen", **wanted},
        }
        try:
            found = ALL[self.name](given)
        except PrerequisiteMissing as missing:
            pytest.skip(str(missing))
        print(f"{self.name}: {json.dumps(found)}")
        line = re.compile(rf"image request request_id={request_id} ")
        # The worker logs a request after it has sent the answer.
        self._worker.wait_for(lambda: len(line.findall(self._worker.output)) >= seen, what=f"asked {seen} times", timeout_s=20)
        assert len(line.findall(self._worker.output)) == seen
        assert found.get("requestID") in (request_id, None)
        return found

    def refused(self, status: int, code: str, of_type: str, *, param: str | None = None, seen: int = 1, **call: Any) -> str:
        """Make a call that must fail with this status, code and type; return its message."""
        found = self.ask(seen=seen, **call)
        expected = {"raised": class_of(self.name, status, seen), "status": status, "code": code, "type": of_type, "param": param}
        assert {name: found.get(name) for name in expected} == expected, found
        return str(found["message"])


@pytest.fixture(params=ALL)
def client(request: pytest.FixtureRequest, worker: WorkerProcess) -> Client:
    return Client(request.param, worker)


@pytest.fixture(params=THAT_STREAM)
def streaming(request: pytest.FixtureRequest, worker: WorkerProcess) -> Client:
    return Client(request.param, worker)


def test_images_come_by_every_sdk_and_are_asked_for_once(client: Client) -> None:
    assert client.ask(size="32x32") == {"raised": None, "images": 1}


def test_images_of_a_stream_come_too_and_no_event_counts_as_an_error(streaming: Client) -> None:
    assert streaming.ask(stream=True, partial_images=1, size="32x32") == {"raised": None, "images": 1}


def test_ten_images_of_vercels_sdk_are_one_request(worker: WorkerProcess) -> None:
    assert Client("vercel-compatible", worker).ask(n=10, size="32x32") == {"raised": None, "images": 10}


def test_the_tool_of_langchain_makes_images_with_all_that_it_sends(worker: WorkerProcess) -> None:
    given = {"baseURL": f"{worker.url}/v1", "apiKey": KEY, "body": {"prompt": "a red seven kumquatfen", "model": "digits"}}
    assert by_langchain({**given, "body": {**given["body"], "n": 2}}) == {"raised": None, "images": 2}


def test_the_tool_of_llama_index_makes_an_image_with_all_that_it_sends(worker: WorkerProcess) -> None:
    # The tool knows no model but OpenAI's, so an adapter has the name of one.
    assert worker.put_adapter("dall-e-3", DIGITS / "loras" / "stripes").status_code == 200
    given = {"baseURL": f"{worker.url}/v1", "apiKey": KEY, "body": {"prompt": "a red seven kumquatfen"}}
    assert by_llama_index(given) == {"raised": None, "images": 1}


def test_a_field_that_is_wrong_is_a_bad_request_that_names_it_and_is_sent_once(client: Client) -> None:
    message = client.refused(400, "InvalidRequest", "invalid_request_error", param="size", size="63x64")
    assert "size: expected width and height that are multiples of 8, found 63x64" in message


def test_a_wrong_key_is_an_authentication_error_and_is_sent_once(client: Client) -> None:
    message = client.refused(401, "Unauthorized", "authentication_error", key="sk-of-another")
    assert "expected the API key" in message and KEY not in message


def test_a_foreign_origin_is_a_permission_error_and_is_sent_once(client: Client) -> None:
    message = client.refused(403, "Forbidden", "invalid_request_error", origin="http://evil.example")
    assert "one of --cors-origin, found http://evil.example" in message


def test_a_model_that_is_not_there_is_a_not_found_error_and_is_sent_once(client: Client) -> None:
    assert "model 'nobody' is not known to this worker" in client.refused(
        404, "model_not_found", "invalid_request_error", param="model", model="nobody"
    )


def test_an_adapter_whose_file_is_bad_is_not_asked_for_again_and_again(client: Client) -> None:
    assert "InvalidAdapter" in client.refused(422, "AdapterNotLoaded", "invalid_request_error", model="bad")


def test_what_may_succeed_later_is_sent_again_by_itself(client: Client, worker: WorkerProcess) -> None:
    worker.sleep()
    try:
        message = client.refused(503, "Asleep", "server_error", seen=1 + RETRIES)
    finally:
        worker.wake()
    assert "the model is asleep" in message


def test_an_error_in_a_stream_is_raised_with_its_message_and_code_and_nothing_is_sent_again(streaming: Client) -> None:
    found = streaming.ask(stream=True, stream_options={"include_progress": True}, num_inference_steps=200, cancels=True)
    raised = "ssestream.StreamError" if streaming.name == "go" else "APIError"
    expected = {"raised": raised, "code": "Cancelled", "type": "invalid_request_error"}
    assert {name: found.get(name) for name in expected} == expected, found
    assert found["message"] == "the request was cancelled by DELETE /v1/requests" and found.get("status") is None


def test_a_stream_that_is_refused_before_it_begins_is_an_error_by_its_status(streaming: Client) -> None:
    streaming.refused(400, "InvalidRequest", "invalid_request_error", param="n", stream=True, n=100)
