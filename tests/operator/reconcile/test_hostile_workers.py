# SPDX-License-Identifier: Apache-2.0
"""The control API's client against hostile workers: each answer is bounded, is reported, and leads nowhere else (fault 4)."""

import asyncio
import json
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs

import pytest

from diffusion_operator.api.adapter_load import AdapterLoad
from diffusion_operator.api.names import DEPLOYMENT
from diffusion_operator.api.source import AdapterSource
from diffusion_operator.errors import ControlRefused, ControlUnreachable
from diffusion_operator.plan.observed.observed import AttemptKey
from diffusion_operator.plan.results.actions import PutAdapter, RemoveAdapter, WorkerAddress
from diffusion_operator.worker_client import ANSWER_BYTES, STATE_BYTES, HttpWorkerClient
from support.operator.rig import Rig, deployment

ADDRESS = WorkerAddress(pod_uid="p", ip="127.0.0.1", boot_id="b")
KEY = AttemptKey(adapter_uid="u", generation=1, boot_id="b")
PUT = PutAdapter(worker=ADDRESS, key=KEY, operation_id="o", name="x", load=AdapterLoad(source=AdapterSource(path="/l")), deadline_s=9)
STATE = {"bootId": "b", "state": "ready"}
LIMIT_S = 0.5
BUFFERS = 16 << 20
"""The most unread bytes that two loopback sockets hold."""

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class RawServer:
    """A server that keeps the heads of requests and writes its answer byte for byte."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.heads: list[str] = []
        self.sent = 0
        self._connections: set[asyncio.Task[None] | None] = set()

    async def close(self) -> None:
        for one in self._connections:
            if one is not None:
                one.cancel()
        await asyncio.gather(*(one for one in self._connections if one is not None), return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(asyncio.current_task())
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                await self.answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # closing the server ends its connections in the same way
        finally:
            writer.close()

    async def flood(self, writer: asyncio.StreamWriter, head: bytes, piece: bytes, pause_s: float = 0) -> None:
        """Write the head and then the piece again and again, without end."""
        writer.write(head)
        while True:
            writer.write(piece)
            await writer.drain()
            self.sent += len(piece)
            await asyncio.sleep(pause_s)


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[RawServer, int]]:
    server = RawServer(answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    try:
        yield server, listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        await server.close()


@asynccontextmanager
async def client_of(answer: Answer) -> AsyncIterator[tuple[HttpWorkerClient, RawServer]]:
    async with serving(answer) as (server, port):
        client = HttpWorkerClient(poll_timeout_s=LIMIT_S, call_timeout_s=LIMIT_S, port=port)
        try:
            yield client, server
        finally:
            await client.close()


def answering(body: bytes, *headers: str, status: str = "200 OK", kind: str = "application/json", length: int | None = None) -> Answer:
    head = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body) if length is None else length}", *headers, "", ""]

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join(head).encode() + body)
        await writer.drain()

    return answer


async def failure(answer: Answer) -> tuple[str, RawServer]:
    """Ask for a state; return the words of the failure and the server. The call must end within the time of a poll."""
    async with client_of(answer) as (client, server):
        begun = time.monotonic()
        with pytest.raises(ControlUnreachable) as caught:
            await client.state("127.0.0.1", token="t")
        assert time.monotonic() - begun < LIMIT_S + 2
    return str(caught.value), server


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
async def test_a_redirect_is_told_and_nothing_is_asked_for_at_its_target(status: str) -> None:
    async with serving(answering(b'{"secret": 1}')) as (target, port):
        location = f"Location: http://127.0.0.1:{port}/secret"
        async with client_of(answering(b"", location, status=status)) as (client, server):
            with pytest.raises(ControlUnreachable, match=f"status {status[:3]}.*no redirect") as caught:
                await client.state("127.0.0.1", token="t")
            with pytest.raises(ControlUnreachable, match="no redirect"):
                await client.put_adapter(PUT, token="t")
            assert len(server.heads) == 2
    assert target.heads == []
    assert str(port) not in str(caught.value), "the target is the worker's word"


async def test_no_proxy_of_the_environment_gets_to_know_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(answering(b"{}")) as (proxy, port):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        async with client_of(answering(json.dumps(STATE).encode())) as (client, server):
            assert (await client.state("127.0.0.1", token="t")).boot_id == "b"
            assert len(server.heads) == 1
    assert proxy.heads == []


async def test_no_cookie_of_a_worker_is_kept() -> None:
    async with client_of(answering(json.dumps(STATE).encode(), "Set-Cookie: a=b; Path=/")) as (client, server):
        await client.state("127.0.0.1", token="t")
        await client.state("127.0.0.1", token="t")
    assert len(server.heads) == 2
    assert not any("cookie" in head.lower() for head in server.heads)


@pytest.mark.parametrize("head", [b"Content-Length: 99999999999", b"Transfer-Encoding: chunked"])
async def test_a_state_without_end_is_left_at_four_mebibytes(head: bytes) -> None:
    piece = b"x" * 65536
    chunk = piece if b"Length" in head else f"{len(piece):x}\r\n".encode() + piece + b"\r\n"

    async def endless(writer: asyncio.StreamWriter) -> None:
        await server.flood(writer, b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + head + b"\r\n\r\n", chunk)

    async with client_of(endless) as (client, server):
        tracemalloc.start()
        try:
            with pytest.raises(ControlUnreachable, match=f"larger than {STATE_BYTES} bytes|no complete answer within"):
                await client.state("127.0.0.1", token="t")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        sent = server.sent
        await asyncio.sleep(0.2)
        assert server.sent <= sent + BUFFERS, "the connection is closed"
    assert server.sent <= STATE_BYTES + BUFFERS
    assert peak <= 4 * STATE_BYTES


async def test_other_answers_are_left_at_sixty_four_kibibytes() -> None:
    body = json.dumps({"code": "Busy", "message": "x" * ANSWER_BYTES}).encode()
    for status in ("200 OK", "503 Busy"):
        async with client_of(answering(body, status=status)) as (client, _):
            with pytest.raises(ControlUnreachable, match=f"larger than {ANSWER_BYTES} bytes"):
                await client.put_adapter(PUT, token="t")
    told, _ = await failure(answering(body, status="503 Busy"))
    assert f"larger than {ANSWER_BYTES} bytes" in told, "an error in place of a state, too"


@pytest.mark.parametrize("where", ["body", "head"])
async def test_an_answer_that_drips_ends_at_the_deadline(where: str) -> None:
    start = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + (b"Content-Length: 1000\r\n\r\n" if where == "body" else b"X-Drip: ")

    async def dripping(writer: asyncio.StreamWriter) -> None:
        await server.flood(writer, start, b" ", 0.02)

    async with client_of(dripping) as (client, server):
        begun = time.monotonic()
        with pytest.raises(ControlUnreachable, match=r"no complete answer within 0\.5 s"):
            await client.state("127.0.0.1", token="t")
        assert time.monotonic() - begun < LIMIT_S + 2


async def test_a_bomb_is_not_decompressed() -> None:
    bomb = zlib.compressobj(9, zlib.DEFLATED, 31)
    body = bomb.compress(b"[" + b" " * (64 << 20)) + bomb.flush()
    assert len(body) < 100 << 10
    tracemalloc.start()
    try:
        told, server = await failure(answering(body, "Content-Encoding: gzip"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "encoded as gzip, expected plain JSON" in told
    assert "Accept-Encoding: identity" in server.heads[0]
    assert peak < 4 << 20


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (answering(b"<html>secret</html>", kind="text/html"), "the answer is of type text/html, expected application/json"),
        (answering(json.dumps(STATE).encode(), kind="text/plain"), "the answer is of type text/plain, expected application/json"),
        (answering(b"{}", kind="a\x1b[2J/b"), "expected application/json"),
        (answering(b"<html>secret</html>"), "not understood"),
        (answering(b"[" * 1_000_000), "not understood"),
        (answering(b'{"bootId": "\xff", "state": "ready"}'), "not understood"),
        (answering(b"", status="204 No Content"), "not understood"),
        (answering(json.dumps(STATE).encode()[:-1]), "not understood"),
        (answering(b"", status="101 Switching Protocols"), "status 101"),
    ],
)
async def test_what_is_no_state_is_told_and_none_of_it_repeated(answer: Answer, said: str) -> None:
    told, _ = await failure(answer)
    assert said in told
    assert "secret" not in told
    assert told.isprintable()
    assert len(told) < 500


@pytest.mark.parametrize(
    "answer", [b"secret\r\n\r\n", b"HTTP/1.1 200 OK\r\nsecret\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: secret\r\n\r\n"]
)
async def test_what_is_no_http_is_told_and_none_of_it_repeated(answer: bytes) -> None:
    async def raw(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    told, _ = await failure(raw)
    assert "no complete and valid HTTP answer" in told
    assert "secret" not in told


async def test_a_length_that_is_a_lie_takes_no_longer_than_the_deadline_and_ends_the_connection() -> None:
    told, _ = await failure(answering(json.dumps(STATE).encode(), length=100_000))
    assert "no complete answer within" in told
    lie = json.dumps(STATE).encode() + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    async with client_of(answering(lie, length=len(json.dumps(STATE)))) as (client, _):
        for _ in range(3):
            assert (await client.state("127.0.0.1", token="t")).boot_id == "b", "what is left over is nobody's answer"


@pytest.mark.parametrize("body", [b"<html>secret</html>", b'["secret"]', b'{"message": "secret"}', b"[" * 50_000])
async def test_an_error_that_is_not_understood_is_its_status_alone(body: bytes) -> None:
    for kind in ("text/html", "application/json"):
        async with client_of(answering(body, status="418 Teapot", kind=kind)) as (client, _):
            with pytest.raises(ControlRefused) as caught:
                await client.put_adapter(PUT, token="t")
        assert (caught.value.code, str(caught.value)) == (
            "Http418",
            "the worker answered with status 418 and a body that is not one of its errors",
        )


async def test_words_of_an_error_are_cut_and_escaped() -> None:
    body = json.dumps({"code": "Bad\n" + "c" * 999, "message": "line\nline \x1b[2J \u202e" + "m" * 9999, "retryAfterSeconds": 5}).encode()
    async with client_of(answering(body, status="400 Bad")) as (client, _):
        with pytest.raises(ControlRefused) as caught:
            await client.put_adapter(PUT, token="t")
    error = caught.value
    assert str(error).startswith(r"line\nline \x1b[2J \u202emmm")
    assert error.code.startswith(r"Bad\nccc")
    assert (len(str(error)), len(error.code)) == (1024, 64)


async def test_a_name_of_a_worker_cannot_lead_to_another_path() -> None:
    async with client_of(answering(b"{}")) as (client, server):
        name = "../sleep?a=b&c#d\r\nX: y"
        await client.remove_adapter(RemoveAdapter(worker=ADDRESS, operation_id=f"remove-{name}", name=name, drain_s=5), token="t")
    path, _, query = server.heads[0].split(" ")[1].partition("?")
    assert path.startswith("/v1/adapters/..%2Fsleep%3F")
    assert parse_qs(query) == {"operationId": [f"remove-{name}"], "bootId": ["b"], "drainSeconds": ["5"]}


@pytest.mark.parametrize(
    "ip", ["example.invalid", "127.0.0.1@evil.invalid", "1.2.3.4/x?", "169.254.169.254", "fe80::1", "224.0.0.1", "0.0.0.0", "::"]
)
async def test_only_an_address_of_a_pod_is_called(ip: str) -> None:
    client = HttpWorkerClient(poll_timeout_s=LIMIT_S, call_timeout_s=LIMIT_S, port=1)
    try:
        with pytest.raises(ControlUnreachable, match="the pod's address is"):
            await client.state(ip, token="t")
    finally:
        await client.close()


NUMBERS: list[dict[str, Any]] = [
    {"stateAgeSeconds": 1e300},
    {"lastRequestAgeSeconds": -1},
    {"held": {"current": 2**40}},
    {"model": {"sizeBytes": 2**63}},
    {"generation": -1},
    {"lastOperation": {"operationId": "o", "kind": "wake", "seconds": 1e300}},
    {"adapters": [{"name": "x", "state": "Loaded", "rank": 2**31}]},
    {"adapters": [{"name": "x", "state": "Loaded"}] * 9000},
]


@pytest.mark.parametrize("more", NUMBERS, ids=lambda more: next(iter(more)))
async def test_numbers_that_no_status_could_hold_make_a_document_unreadable(more: dict[str, Any]) -> None:
    told, _ = await failure(answering(json.dumps(STATE | more).encode()))
    assert "the state document of 127.0.0.1 is not understood" in told


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (answering(b"", "Location: http://127.0.0.1:1/secret", status="302 Found"), "status 302"),
        (answering(b"<html>secret</html>", kind="text/html"), "the answer is of type text/html"),
        (answering(b"x" * (STATE_BYTES + 1)), f"larger than {STATE_BYTES} bytes"),
    ],
)
@pytest.mark.parametrize("ready", [True, False])
async def test_the_status_tells_of_a_worker_that_answers_so(answer: Answer, said: str, ready: bool) -> None:
    async with client_of(answer) as (client, _):
        rig = Rig()
        rig.workers = rig.runtime.workers = client
        rig.cluster.put(deployment())
        await rig.run()
        rig.cluster.running("d-0-0", "127.0.0.1", ready=ready)
        await rig.run(40)
    assert said in rig.message("Ready")
    assert rig.condition("Ready")[0] != "True"
    assert "secret" not in json.dumps(rig.cluster.find(DEPLOYMENT, "d"))
    assert rig.errors == []


async def test_last_words_of_a_container_are_escaped_in_the_status() -> None:
    rig = Rig()
    rig.cluster.put(deployment())
    await rig.run()
    rig.start("d-0-0")
    rig.cluster.crashed("d-0-0", code=1, message="Traceback:\n\x1b[31m red")
    await rig.run()
    assert r"Traceback:\n\x1b[31m red" in rig.message("Ready")
