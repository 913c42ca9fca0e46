# SPDX-License-Identifier: Apache-2.0
"""Errors as OpenAI's SDKs for Python and JavaScript raise them, on a real worker process: class, message, code, and repetitions.

A repetition is counted where it arrives: the worker logs each image request once.
"""

import json
import os
import re
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from support.worker.process import FAKE_PROGRAM, WorkerProcess
from tools import openai_js
from tools.devcluster.errors import PrerequisiteMissing

# A process, and a second one for JavaScript; a repetition waits half a second.
pytestmark = pytest.mark.slow
KEY = "sk-of-the-worker"
SCRIPT = Path(__file__).parents[2] / "support" / "worker" / "openai_errors.mjs"
RETRIES = 2

Raised = Mapping[str, Any]
Calls = Callable[..., Raised]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A server with an API key, an adapter whose file is bad, and ranks that take a step in a hundredth of a second."""
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


def by_python(worker: WorkerProcess, *, key: str = KEY, cancel: str | None = None, headers: Mapping[str, str], **body: Any) -> Raised:
    """The exception of the SDK for Python, in the words of that for JavaScript."""
    with OpenAI(base_url=f"{worker.url}/v1", api_key=key, max_retries=RETRIES, timeout=60) as client:
        try:
            answer: Any = client.post(
                "/images/generations", cast_to=object, body=body, options={"headers": dict(headers)},
                stream=bool(body.get("stream")), stream_cls=openai.Stream[Any],
            )  # fmt: skip
            for number, _ in enumerate(answer if body.get("stream") else ()):
                if cancel and number == 0:
                    client.delete(f"/requests/{cancel}", cast_to=type(None))
        except openai.APIError as error:
            status, request_id = getattr(error, "status_code", None), getattr(error, "request_id", None)
            found = {"code": error.code, "type": error.type, "param": error.param, "status": status, "requestID": request_id}
            return {"raised": type(error).__name__, "message": str(error), **found}
    return {"raised": None}


def by_javascript(worker: WorkerProcess, *, key: str = KEY, cancel: str | None = None, headers: Mapping[str, str], **body: Any) -> Raised:
    """The exception of the SDK for JavaScript."""
    try:
        folder = openai_js.modules()
    except PrerequisiteMissing as missing:
        pytest.skip(str(missing))
    call = {"apiKey": key, "maxRetries": RETRIES, "headers": headers, "body": body, "cancel": cancel}
    given, env = json.dumps({"baseURL": f"{worker.url}/v1", "calls": [call]}), {**os.environ, "OPENAI_JS": str(folder)}
    ended = subprocess.run(["node", str(SCRIPT)], input=given, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    raised: Raised = json.loads(ended.stdout)
    return raised


@pytest.fixture(params=[by_python, by_javascript], ids=["python", "javascript"])
def ask(request: pytest.FixtureRequest, worker: WorkerProcess) -> Calls:
    """A call by one of the SDKs: what it raised, and how often the worker saw the request."""
    call: Callable[..., Raised] = request.param

    def ask(**wanted: Any) -> Raised:
        request_id = uuid.uuid4().hex
        body = {"prompt": "a red seven", **wanted}
        raised = {**call(worker, headers={"X-Request-ID": request_id}, cancel=request_id if body.get("stream") else None, **body)}
        print(f"{call.__name__}: {json.dumps(raised)}")
        seen = re.compile(rf"image request request_id={request_id} ")
        worker.wait_for(lambda: seen.search(worker.output), what="seen in the log", timeout_s=10)
        assert raised.get("requestID") in (request_id, None)
        return {**raised, "seen": len(seen.findall(worker.output))}

    return ask


def assert_raised(found: Raised, **expected: Any) -> None:
    assert {name: found.get(name) for name in expected} == expected, found


def test_a_field_that_is_wrong_is_a_bad_request_that_names_it_and_is_sent_once(ask: Calls) -> None:
    found = ask(size="63x64")
    assert_raised(found, raised="BadRequestError", status=400, code="InvalidRequest", type="invalid_request_error", param="size", seen=1)
    assert "size: expected width and height that are multiples of 8, found 63x64" in found["message"]


def test_a_wrong_key_is_an_authentication_error_and_is_sent_once(ask: Calls) -> None:
    found = ask(key="sk-of-another")
    assert_raised(found, raised="AuthenticationError", status=401, code="Unauthorized", type="authentication_error", param=None, seen=1)
    assert "expected the API key" in found["message"] and KEY not in found["message"]


def test_a_model_that_is_not_there_is_a_not_found_error_and_is_sent_once(ask: Calls) -> None:
    found = ask(model="nobody")
    assert_raised(found, raised="NotFoundError", status=404, code="NotFound", type="invalid_request_error", seen=1)
    assert "model 'nobody' is not known here" in found["message"]


def test_an_adapter_whose_file_is_bad_is_not_asked_for_again_and_again(ask: Calls) -> None:
    found = ask(model="bad")
    expected = {"status": 422, "code": "AdapterNotLoaded", "type": "invalid_request_error", "seen": 1}
    assert_raised(found, raised="UnprocessableEntityError", **expected)
    assert "InvalidAdapter" in found["message"]


def test_an_error_in_a_stream_is_raised_with_its_message_and_code_and_nothing_is_sent_again(ask: Calls) -> None:
    found = ask(stream=True, num_inference_steps=200)
    assert_raised(found, raised="APIError", status=None, code="Cancelled", type="invalid_request_error", seen=1)
    assert found["message"] == "the request was cancelled"


def test_a_stream_that_is_refused_before_it_begins_is_an_error_by_its_status(ask: Calls) -> None:
    assert_raised(ask(stream=True, n=100), raised="BadRequestError", status=400, code="InvalidRequest", param="n", seen=1)


def test_what_may_succeed_later_is_sent_again_by_itself(ask: Calls, worker: WorkerProcess) -> None:
    worker.sleep()
    try:
        found = ask()
    finally:
        worker.wake()
    assert_raised(found, raised="InternalServerError", status=503, code="Asleep", type="server_error", seen=1 + RETRIES)
    assert "the model is asleep" in found["message"]
