# SPDX-License-Identifier: Apache-2.0
"""Hostile clients: slow heads, slow bodies, broken ones, and clients that leave at any stage."""

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from diffusion_worker.server import app as server_app
from diffusion_worker.server import serve
from diffusion_worker.server.encoding.threads import EncodingThreads
from diffusion_worker.server.http.body_limit import SLOWEST_BYTES_PER_S, BodyLimit
from diffusion_worker.server.http.connection import BoundedConnection
from support.worker.fake_rank_group import FakeRankGroup
from support.worker.process import FAKE_PROGRAM, WorkerProcess
from support.worker.server_edge import DEADLINE_S, Client, Edge, serving_edge

HEAD = b"POST /v1/images/generations HTTP/1.1\r\nHost: worker\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"prompt": "p kumquatfen"}).encode()


class ImpatientConnection(BoundedConnection):
    head_timeout_s = 0.05


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with serving_edge(max_batch_size=2) as edge:
        yield edge


@asynccontextmanager
async def listening(application: ASGIApp, protocol: type[BoundedConnection] = ImpatientConnection) -> AsyncIterator[int]:
    """Serve an application on a real socket of loopback in this event loop, and yield the port; end with the block."""
    config = uvicorn.Config(application, lifespan="off", ws="none", log_config=None)
    config.load()
    state = uvicorn.server.ServerState()
    server = await asyncio.get_running_loop().create_server(lambda: protocol(config, state, {}), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Read until the server closes the connection, even by a reset, and return all bytes.

    Raises:
        TimeoutError: it stays open for longer than DEADLINE_S.
    """
    received = b""
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(DEADLINE_S):
            while part := await reader.read(65536):
                received += part
    return received


# Slow heads


@pytest.mark.parametrize("sent", [b"", b"P", HEAD])
async def test_a_head_that_does_not_come_costs_a_connection_for_a_time_only(edge: Edge, sent: bytes) -> None:
    async with listening(edge.data_application) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert await read_all(reader) == b""
        writer.close()


async def test_bytes_that_trickle_do_not_lengthen_the_time_of_a_head(edge: Edge) -> None:
    async with listening(edge.data_application) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        closed = asyncio.create_task(read_all(reader))
        while not closed.done():
            writer.write(b"G")
            await asyncio.wait({closed}, timeout=0.01)
        assert await closed == b""
        writer.close()


async def test_an_answer_may_take_longer_than_a_head_and_the_next_head_has_its_own_time(edge: Edge) -> None:
    edge.ranks.stepping.clear()
    async with listening(edge.data_application) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        request = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        writer.write(request)
        await edge.wait_state(inFlight=1)
        # An image takes twice the time of a head here.
        waiting = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        done, _ = await asyncio.wait({waiting}, timeout=2 * ImpatientConnection.head_timeout_s)
        assert not done
        edge.ranks.stepping.set()
        async with asyncio.timeout(DEADLINE_S):
            head = await waiting
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        writer.write(HEAD)
        assert await read_all(reader) == b""
        writer.close()


async def test_the_rest_of_a_refused_body_has_the_time_of_a_head(edge: Edge) -> None:
    async with listening(edge.data_application) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"Content-Length: 99999999\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413")
        closed = asyncio.create_task(read_all(reader))
        while not closed.done():
            writer.write(b"x")
            await asyncio.wait({closed}, timeout=0.01)
        assert b'"InvalidRequest"' in await closed
        writer.close()


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET /\xff HTTP/1.1\r\n\r\n", b"\0" * 100_000])
async def test_what_is_no_http_is_refused_and_closed(edge: Edge, garbage: bytes) -> None:
    async with listening(edge.data_application) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        assert (await read_all(reader)).startswith(b"HTTP/1.1 400")
        writer.close()
        assert (await edge.request_images(prompt="p kumquatfen")).status_code == 200


# Answers that nobody reads


@pytest.mark.slow
async def test_an_answer_that_nobody_reads_costs_a_connection_for_a_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "UNREAD_TIMEOUT_S", 1)
    ended = asyncio.Event()

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100000000")]})
        for _ in range(100):
            await send({"type": "http.response.body", "body": b"x" * 1_000_000, "more_body": True})
        ended.set()

    config = uvicorn.Config(application, lifespan="off", ws="none", log_config=None)
    config.load()
    state = uvicorn.server.ServerState()
    bound = serve._bind("--port", "127.0.0.1", 0)
    server = await asyncio.get_running_loop().create_server(lambda: BoundedConnection(config, state, {}), sock=bound)
    with socket.create_connection(bound.getsockname()) as deaf:
        deaf.sendall(b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n")
        async with asyncio.timeout(30):
            await ended.wait()
        assert not state.connections
    server.close()
    await server.wait_closed()


@pytest.mark.slow
def test_a_stream_is_finished_before_a_terminated_worker_ends() -> None:
    env = {"FAKE_WORKER": json.dumps({"stepSeconds": 0.1})}
    with WorkerProcess(program=FAKE_PROGRAM, env=env) as worker:
        worker.wait_ready()
        body = {"prompt": "p kumquatfen", "stream": True, "stream_options": {"include_progress": True}, "num_inference_steps": 10}
        with httpx2.stream("POST", f"{worker.url}/v1/images/generations", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: image_generation.progress"
            worker.send_signal(signal.SIGTERM)
            assert "event: image_generation.completed" in list(lines)
        assert worker.wait_exit() == 0


# Slow bodies


async def test_a_body_that_stops_is_refused_after_its_time() -> None:
    answers = await _answers_to_slow_body([b"x" * 10], grace_s=0.05)
    assert answers[0]["status"] == 408
    problem = json.loads(answers[1]["body"])["error"]
    assert (problem["code"], problem["retryable"]) == ("Timeout", True)
    assert str(SLOWEST_BYTES_PER_S) in problem["message"] and "found 10 bytes" in problem["message"]


async def test_a_body_that_goes_on_has_more_time() -> None:
    """Send a tenth of `SLOWEST_BYTES_PER_S` and then nothing: the answer comes no sooner than 0.1 s after the grace of 0.05 s."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    await _answers_to_slow_body([b"x" * (SLOWEST_BYTES_PER_S // 10)], grace_s=0.05)
    assert loop.time() - started >= 0.15


async def _answers_to_slow_body(parts: list[bytes], *, grace_s: float) -> list[dict[str, Any]]:
    """Send a request whose body stops after these parts, with this grace, and return the messages of the answer."""
    application = server_app.data_app(Edge(FakeRankGroup()).engine)
    for middleware in application.user_middleware:
        if middleware.cls is BodyLimit:
            middleware.kwargs["grace_s"] = grace_s
    client = Client(application, *parts)
    await client.end()
    return [client.sent.get_nowait() for _ in range(client.sent.qsize())]


# Clients that leave


async def test_a_client_that_leaves_in_its_body_is_no_error_of_anybody(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    await Client(edge.data_application, b'{"prompt": ').leave()
    assert 'code="ClientGone"' in (await edge.data.get("/metrics")).text
    assert "Traceback" not in caplog.text


async def test_a_client_that_leaves_while_queued_or_stepping_frees_its_place(edge: Edge) -> None:
    edge.ranks.stepping.clear()
    running, queued = (Client(edge.data_application, n=2) for _ in range(2))
    await edge.wait_state(inFlight=2, queued=2)
    await queued.leave()
    await edge.wait_state(inFlight=2, queued=0)
    await running.leave()
    edge.ranks.stepping.set()
    await edge.wait_state(inFlight=0, queued=0)
    assert (await edge.request_images(prompt="p kumquatfen")).status_code == 200


async def test_a_client_that_leaves_while_its_image_is_encoded_gets_none(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = asyncio.Event()

    async def never(self: EncodingThreads, *_: object, **__: object) -> None:
        encoding.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(EncodingThreads, "run", never)
    leaving = Client(edge.data_application)
    async with asyncio.timeout(DEADLINE_S):
        await encoding.wait()
    await leaving.leave()
    await edge.wait_state(inFlight=0, queued=0)
    assert (await leaving.message())["status"] == 499


async def test_nothing_is_left_of_clients_that_left(edge: Edge) -> None:
    before = asyncio.all_tasks()
    edge.ranks.stepping.clear()
    clients = [Client(edge.data_application, stream=stream) for stream in (False, True) for _ in range(10)]
    await edge.wait_state(inFlight=2, queued=18)
    for client in clients:
        await client.leave()
    edge.ranks.stepping.set()
    await edge.wait_state(inFlight=0, queued=0)
    await edge.wait_tasks(before)
    assert edge.data_application.state.running._cancelled == {}
