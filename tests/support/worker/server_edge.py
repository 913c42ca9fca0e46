# SPDX-License-Identifier: Apache-2.0
"""The worker's HTTP edge in this process, called without sockets, and an edge whose model sleeps until a test lets it wake.

Real: both applications and the engine. Not real: the ranks, which are a `FakeRankGroup`, and the ASGI server.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from diffusion_worker.messages import ModelInfo
from diffusion_worker.server.app import control_app, data_app
from support.worker.fake_rank_group import FakeRankGroup
from support.worker.sleep_rig import SleepRig, write_desired

DEADLINE_S = 60.0


class Edge(SleepRig):
    """A fake-rank engine behind the data and control applications, with an in-process HTTP client for either."""

    def __init__(self, group: FakeRankGroup, *, token_path: Path | None = None, local: bool = False, **settings: Any) -> None:
        super().__init__(group, **settings)
        self.data_application = data_app(self.engine, local=local)
        self.data = _client(self.data_application)
        # Without a token the control port accepts loopback hosts only.
        self.control = _client(control_app(self.engine, token_path), "http://worker" if token_path else "http://127.0.0.1:8001")

    async def request_images(self, **body: Any) -> httpx2.Response:
        return await self.data.post("/v1/images/generations", json=body)

    async def operate(self, kind: str, **body: Any) -> httpx2.Response:
        return await self.control.post(f"/v1/{kind}", json=_call(**body))

    async def put_adapter(self, name: str, path: str, **body: Any) -> httpx2.Response:
        return await self.control.put(f"/v1/adapters/{name}", json=_call(**{"source": {"path": path}, **body}))

    async def delete_adapter(self, name: str, **query: Any) -> httpx2.Response:
        return await self.control.delete(f"/v1/adapters/{name}", params=_call(**{"drainSeconds": 5, **query}))

    async def state(self) -> dict[str, Any]:
        """Return the state document."""
        answer = await self.control.get("/v1/state")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def wait_state(self, **wanted: Any) -> dict[str, Any]:
        """Wait until these fields of the state document have these values, and return it. TimeoutError after DEADLINE_S."""
        async with asyncio.timeout(DEADLINE_S):
            while not wanted.items() <= (document := await self.state()).items():  # noqa: ASYNC110
                await asyncio.sleep(0)
        return document

    async def wait_held(self, count: int) -> None:
        """Wait until so many requests are held."""

        async def held() -> bool:
            return bool((await self.state())["held"]["current"] == count)

        await self.wait_for(held)

    async def wait_tasks(self, before: set[asyncio.Task[Any]]) -> None:
        """Wait until no task is left other than those in `before`."""

        async def gone() -> bool:
            return asyncio.all_tasks() - before <= {asyncio.current_task()}

        await self.wait_for(gone)

    async def wait_for(self, check: Callable[[], Awaitable[bool]], *, pause_s: float = 0.0) -> None:
        """Yield to the event loop until `check` returns True.

        Without a pause no state between two steps of the loop is missed. With one, decoders get a core: their processes have a lower
        priority.
        """
        async with asyncio.timeout(DEADLINE_S):
            while not await check():  # noqa: ASYNC110
                await asyncio.sleep(pause_s)


@asynccontextmanager
async def serving_edge(
    *, token_path: Path | None = None, local: bool = False, model: ModelInfo | None = None, **settings: Any
) -> AsyncIterator[Edge]:
    """Start an edge and its engine, and end them afterwards; `model` is the model that its ranks report."""
    edge = Edge(FakeRankGroup(settings.get("ranks", 1)), token_path=token_path, local=local, **settings)
    edge.ranks.model = model or edge.ranks.model
    async with edge.serving(DEADLINE_S):
        yield edge


@asynccontextmanager
async def sleeping_edge(
    folder: Path, policy: str = "OnIdle", *, settings: dict[str, Any] | None = None, **cold: Any
) -> AsyncIterator[Edge]:
    """Provide an edge that has fallen asleep. Any call to the ranks, a wake included, hangs until the test sets `edge.ranks.calling`;
    `cold` gives fields of coldRequests."""
    async with serving_edge(desired_path=write_desired(folder, policy, coldRequests=cold), **(settings or {})) as edge:
        await fall_asleep(edge)
        yield edge


async def fall_asleep(edge: Edge) -> None:
    if edge.engine.state != "asleep":
        await edge.operate("sleep")
        await edge.wait_state(state="asleep", operation=None)
    edge.ranks.calling.clear()


def code(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def _client(application: Any, url: str = "http://worker") -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=application, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url=url)


def _call(**fields: Any) -> dict[str, Any]:
    return {"operationId": uuid.uuid4().hex, "bootId": "boot-1", **fields}


class Client:
    """A request for images whose ASGI messages are read one by one. The body is JSON with these fields, or `parts` of an unfinished one.

    The client leaves when `gone` is set, and accepts no message while `reading` is cleared.
    """

    def __init__(self, application: Any, *parts: bytes, request_id: str | None = None, **body: Any) -> None:
        self._unread = list(parts) or [json.dumps({"prompt": "p kumquatfen", **body}).encode()]
        self._stops = bool(parts)
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.gone, self.reading = asyncio.Event(), asyncio.Event()
        self.reading.set()
        path, headers = "/v1/images/generations", {"content-type": "application/json"}
        if request_id:
            headers["x-request-id"] = request_id
        scope = {
            "type": "http", "http_version": "1.1", "scheme": "http", "server": ("worker", 80),
            "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }  # fmt: skip
        self._answering = asyncio.create_task(application(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._unread:
            return {"type": "http.request", "body": self._unread.pop(0), "more_body": self._stops}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reading.wait()
        self.sent.put_nowait(message)

    async def message(self) -> dict[str, Any]:
        """Wait for the application's next ASGI message, the response's start or a chunk. Raises TimeoutError after DEADLINE_S seconds."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.sent.get()

    async def body(self) -> str:
        """Wait for the next chunk of the response body and return it as text."""
        return bytes((await self.message())["body"]).decode()

    async def event(self) -> dict[str, Any]:
        """Return the data of the next event, skipping keep-alive comments."""
        text = ""
        while not (text.startswith("event: ") and text.endswith("\n\n")):
            text = (text + await self.body()).removeprefix(": keep-alive\n\n")
        return dict(json.loads(text.partition("data: ")[2]))

    async def end(self) -> None:
        """Wait until the application has finished the request."""
        async with asyncio.timeout(DEADLINE_S):
            await self._answering

    async def leave(self) -> None:
        """Leave, and wait until the application has noticed."""
        self.gone.set()
        await self.end()
