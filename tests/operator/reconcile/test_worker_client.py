# SPDX-License-Identifier: Apache-2.0
"""The control API's client against a server on loopback: what goes over the wire, and what each answer becomes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from diffusion_operator.api.adapter_load import AdapterLoad
from diffusion_operator.api.deployment_spec import DrainMode, SleepLevel, SleepPolicy
from diffusion_operator.api.source import AdapterSource
from diffusion_operator.api.worker_state import WorkerPhase
from diffusion_operator.errors import ControlRefused, ControlUnreachable
from diffusion_operator.plan.observed.observed import AttemptKey
from diffusion_operator.plan.results.actions import PutAdapter, RemoveAdapter, SleepWorker, WakeWorker, WorkerAddress
from diffusion_operator.worker_client import HttpWorkerClient

ADDRESS = WorkerAddress(pod_uid="p", ip="127.0.0.1", boot_id="b")
KEY = AttemptKey(adapter_uid="u", generation=1, boot_id="b")
LOAD = AdapterLoad(source=AdapterSource(path="/l"), scale=0.5)
PUT = PutAdapter(worker=ADDRESS, key=KEY, operation_id="o", name="x", load=LOAD, deadline_s=9)
Answer = Callable[[web.Request], Awaitable[web.Response]]


class Server:
    """Notes what it is asked and answers as told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.authorization: list[str | None] = []
        self.answer: Answer = self._fine

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.method, request.path_qs, body))
        self.authorization.append(request.headers.get("Authorization"))
        return await self.answer(request)

    async def _fine(self, request: web.Request) -> web.Response:
        return web.json_response({"bootId": "b", "state": "asleep", "unknown": [1]})


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[HttpWorkerClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    made = HttpWorkerClient(poll_timeout_s=0.3, call_timeout_s=0.3, port=port)
    yield made
    await made.close()
    await runner.cleanup()


async def test_the_state_document_is_read_and_unknown_members_are_ignored(server: Server, client: HttpWorkerClient) -> None:
    state = await client.state("127.0.0.1", token="t")
    assert (state.boot_id, state.state) == ("b", WorkerPhase.ASLEEP)
    assert server.asked == [("GET", "/v1/state", None)]
    assert server.authorization == ["Bearer t"]


async def test_calls_carry_operation_and_boot_id(server: Server, client: HttpWorkerClient) -> None:
    await client.sleep(
        SleepWorker(
            worker=ADDRESS,
            operation_id="s",
            attempt=1,
            mode=DrainMode.ABORT,
            deadline_s=7,
            level=SleepLevel.DISCARD,
            policy=SleepPolicy.ON_IDLE,
        ),
        token="t",
    )
    await client.wake(WakeWorker(worker=ADDRESS, operation_id="w", attempt=1, deadline_s=8, policy=SleepPolicy.ALWAYS_AWAKE), token="t")
    await client.put_adapter(PUT, token="t")
    await client.remove_adapter(RemoveAdapter(worker=ADDRESS, operation_id="r", name="x", drain_s=5), token="t")
    sleep = {"operationId": "s", "bootId": "b", "level": "Discard", "mode": "Abort", "deadlineSeconds": 7, "policy": "OnIdle"}
    put = {
        "operationId": "o", "bootId": "b", "deadlineSeconds": 9, "source": {"path": "/l"}, "digest": None, "scale": 0.5,
        "components": [], "format": None, "expectedRank": None, "residency": "Cached", "priority": 0,
    }  # fmt: skip
    assert server.asked == [
        ("POST", "/v1/sleep", sleep),
        ("POST", "/v1/wake", {"operationId": "w", "bootId": "b", "deadlineSeconds": 8, "policy": "AlwaysAwake"}),
        ("PUT", "/v1/adapters/x", put),
        ("DELETE", "/v1/adapters/x?operationId=r&bootId=b&drainSeconds=5", None),
    ]


async def test_an_error_body_becomes_a_typed_refusal(server: Server, client: HttpWorkerClient) -> None:
    async def busy(request: web.Request) -> web.Response:
        body = {"code": "Busy", "message": "starting", "retryable": True, "retryAfterSeconds": 2.5, "details": {}}
        return web.json_response(body, status=503)

    server.answer = busy
    with pytest.raises(ControlRefused, match="starting") as caught:
        await client.put_adapter(PUT, token="t")
    error = caught.value
    assert (error.code, error.retryable, error.retry_after_s, error.status) == ("Busy", True, 2.5, 503)


async def test_an_answer_that_is_no_error_body_is_still_an_error(server: Server, client: HttpWorkerClient) -> None:
    async def proxy_error(request: web.Request) -> web.Response:
        return web.Response(status=502, text="bad gateway")

    server.answer = proxy_error
    with pytest.raises(ControlRefused, match="status 502 without an error") as caught:
        await client.put_adapter(PUT, token="t")
    assert (caught.value.code, caught.value.retryable) == ("Http502", True)


async def test_removing_what_is_not_there_is_done(server: Server, client: HttpWorkerClient) -> None:
    async def missing(request: web.Request) -> web.Response:
        return web.json_response({"code": "NotFound", "message": "no x"}, status=404)

    server.answer = missing
    await client.remove_adapter(RemoveAdapter(worker=ADDRESS, operation_id="r", name="x", drain_s=5), token="t")


async def test_silence_ends_after_the_limit(server: Server, client: HttpWorkerClient) -> None:
    async def silent(request: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    server.answer = silent
    async with asyncio.timeout(2):
        with pytest.raises(ControlUnreachable, match="no whole answer within"):
            await client.state("127.0.0.1", token="t")


async def test_a_document_of_another_shape_is_not_believed(server: Server, client: HttpWorkerClient) -> None:
    async def other(request: web.Request) -> web.Response:
        return web.json_response({"bootId": "b", "state": 7})

    server.answer = other
    with pytest.raises(ControlUnreachable, match="not understood"):
        await client.state("127.0.0.1", token="t")


async def test_a_closed_port_is_unreachable() -> None:
    client = HttpWorkerClient(poll_timeout_s=1, call_timeout_s=1, port=1)
    try:
        with pytest.raises(ControlUnreachable):
            await client.state("127.0.0.1", token="t")
    finally:
        await client.close()
