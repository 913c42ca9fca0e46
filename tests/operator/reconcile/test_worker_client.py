# SPDX-License-Identifier: Apache-2.0
"""The control API's client against a server on loopback: the requests that it sends, and its result for each answer."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from diffusion_operator import worker_client
from diffusion_operator.api.adapter_load import AdapterLoad
from diffusion_operator.api.deployment_spec import DrainMode, SleepLevel, SleepPolicy
from diffusion_operator.api.source import AdapterSource
from diffusion_operator.api.worker_state import WorkerPhase
from diffusion_operator.errors import ControlRefused, ControlUnreachable
from diffusion_operator.plan.observed.observed import AttemptKey
from diffusion_operator.plan.results.actions import DrainWorker, PutAdapter, RemoveAdapter, SleepWorker, WakeWorker, WorkerAddress
from diffusion_operator.worker_client import HttpWorkerClient, bearer

ADDRESS = WorkerAddress(pod_uid="p", ip="127.0.0.1", boot_id="b")
KEY = AttemptKey(adapter_uid="u", generation=1, boot_id="b")
LOAD = AdapterLoad(source=AdapterSource(path="/l"), scale=0.5)
PUT = PutAdapter(worker=ADDRESS, key=KEY, operation_id="o", name="x", load=LOAD, deadline_s=9)
Answer = Callable[[web.Request], Awaitable[web.Response]]


class Server:
    """A server that records its requests and answers by a script."""

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
        return web.json_response({"bootId": "b", "state": "asleep"})


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


async def test_the_state_document_is_read(server: Server, client: HttpWorkerClient) -> None:
    state = await client.state("127.0.0.1", token="t", pod_uid="p")
    assert (state.boot_id, state.state) == ("b", WorkerPhase.ASLEEP)
    assert server.asked == [("GET", "/v1/state?limit=1000", None)]
    assert server.authorization == [f"Bearer {bearer('t', 'p')}"]


def pages(*answers: dict[str, Any]) -> Answer:
    """Return a script that gives these pages in turn, and the last one again and again."""
    left = list(answers)

    async def give(_: web.Request) -> web.Response:
        return web.json_response({"bootId": "b", "state": "ready", "revision": "b.7"} | (left.pop(0) if len(left) > 1 else left[0]))

    return give


def one(name: str) -> dict[str, Any]:
    return {"name": name, "state": "Loaded"}


async def test_the_pages_of_a_state_document_are_taken_together(server: Server, client: HttpWorkerClient) -> None:
    server.answer = pages({"adapters": [one("a")], "adaptersContinue": "b.1"}, {"adapters": [one("b")]})
    state = await client.state("127.0.0.1", token="t", after="b.3", wait_s=0.1)
    assert [record.name for record in state.adapters] == ["a", "b"]
    assert [path for _, path, _ in server.asked] == ["/v1/state?after=b.3&wait=0.1&limit=1000", "/v1/state?continue=b.1&limit=1000"]


@pytest.mark.parametrize(
    "answers",
    [
        ({"adapters": [one("a")], "adaptersContinue": "b.1"},),
        ({"adapters": [one("a")], "adaptersContinue": "b.1"}, {"bootId": "c", "adapters": [one("b")]}),
        ({"adapters": [], "adaptersSince": "b.2"},),
    ],
    ids=["without an end", "of two lives of the server", "since another revision"],
)
async def test_pages_that_do_not_go_together_are_no_answer(server: Server, client: HttpWorkerClient, answers: Any) -> None:
    server.answer = pages(*answers)
    with pytest.raises(ControlUnreachable, match="the state document of"):
        await client.state("127.0.0.1", token="t", after="b.3", wait_s=0.1)


async def test_a_page_is_read_up_to_a_mebibyte(server: Server, client: HttpWorkerClient) -> None:
    """Check that a page after a revision is read up to 1 MiB. A worker without a revision sends its whole document, which may be four
    times as large."""
    server.answer = pages({"features": {"a": "x" * (2 << 20)}})
    assert (await client.state("127.0.0.1", token="t")).revision == "b.7"
    with pytest.raises(ControlUnreachable, match="1048576"):
        await client.state("127.0.0.1", token="t", after="b.7")


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
    await client.drain(DrainWorker(worker=ADDRESS, operation_id="d", deadline_s=6), token="t")
    await client.put_adapter(PUT, token="t")
    await client.remove_adapter(RemoveAdapter(worker=ADDRESS, operation_id="r", name="x", drain_s=5), token="t")
    sleep = {"operationId": "s", "bootId": "b", "level": "Discard", "mode": "Abort", "deadlineSeconds": 7, "policy": "OnIdle"}
    put = {
        "operationId": "o", "bootId": "b", "deadlineSeconds": 9, "source": {"path": "/l"}, "digest": None, "identity": None, "scale": 0.5,
        "components": [], "format": None, "expectedRank": None, "residency": "Cached", "priority": 0,
    }  # fmt: skip
    assert server.asked == [
        ("POST", "/v1/sleep", sleep),
        ("POST", "/v1/wake", {"operationId": "w", "bootId": "b", "deadlineSeconds": 8, "policy": "AlwaysAwake"}),
        ("POST", "/v1/drain", {"operationId": "d", "bootId": "b", "deadlineSeconds": 6}),
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
    with pytest.raises(ControlRefused, match="status 502 and a body that is not one of its errors") as caught:
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
    async with asyncio.timeout(30):
        with pytest.raises(ControlUnreachable, match="no complete answer within"):
            await client.state("127.0.0.1", token="t")


async def test_a_watch_ends_five_seconds_after_the_time_that_the_worker_was_given(
    server: Server, client: HttpWorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(request: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    assert worker_client.WAIT_GRACE_S == 5
    monkeypatch.setattr(worker_client, "WAIT_GRACE_S", 0.2)
    server.answer = silent
    begun = asyncio.get_running_loop().time()
    with pytest.raises(ControlUnreachable, match=r"no complete answer within 0\.7 s"):
        await client.state("127.0.0.1", token="t", after="b.1", wait_s=0.5)
    assert asyncio.get_running_loop().time() - begun >= 0.7


async def test_the_kernel_asks_every_five_seconds_whether_a_worker_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    make = worker_client.keepalive_socket
    monkeypatch.setattr(worker_client, "keepalive_socket", lambda address: made.append(make(address)) or made[-1])
    client = HttpWorkerClient(poll_timeout_s=1, call_timeout_s=1, port=1)
    with pytest.raises(ControlUnreachable):
        await client.state("127.0.0.1", token="t")
    await client.close()
    with make((socket.AF_INET, socket.SOCK_STREAM, 0)) as one:
        asked = [one.getsockopt(socket.IPPROTO_TCP, option) for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)]
        assert (one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), asked) == (1, [5, 5, 3])
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
    assert made, "each connection is made so"


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
