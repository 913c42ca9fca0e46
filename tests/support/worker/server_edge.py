# SPDX-License-Identifier: Apache-2.0
"""The worker's HTTP edge in this process: real applications and engine over a fake rank group, called without sockets."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.engine import Engine
from diffusion_worker.messages import ModelInfo
from diffusion_worker.server.app import control_app, data_app
from support.worker.fake_fetcher import FakeFetcher
from support.worker.fake_rank_group import FakeRankGroup

DEADLINE_S = 10.0


class Edge:
    """One engine with both of its applications, and a client for each."""

    def __init__(self, group: FakeRankGroup, *, token_path: Path | None = None, **settings: Any) -> None:
        self.config = WorkerConfig(**{"model": "/models/digits", "served_name": "digits", **settings})
        self.ranks = group
        group.max_cached = self.config.max_cached_loras
        self.fetcher = FakeFetcher(self.config)
        self.engine = Engine(self.config, group, boot_id="boot-1", fetcher=self.fetcher)
        self.data_application = data_app(self.engine)
        self.data = _client(self.data_application)
        self.control = _client(control_app(self.engine, token_path))

    async def request_images(self, **body: Any) -> httpx2.Response:
        """The answer to an image request."""
        return await self.data.post("/v1/images/generations", json=body)

    async def operate(self, kind: str, **body: Any) -> httpx2.Response:
        """The answer to a sleep or wake."""
        return await self.control.post(f"/v1/{kind}", json={"operationId": uuid.uuid4().hex, "bootId": "boot-1", **body})

    async def put_adapter(self, name: str, path: str, **body: Any) -> httpx2.Response:
        """The answer to a put of an adapter."""
        call = {"operationId": uuid.uuid4().hex, "bootId": "boot-1", "source": {"path": path}, **body}
        return await self.control.put(f"/v1/adapters/{name}", json=call)

    async def delete_adapter(self, name: str, **query: Any) -> httpx2.Response:
        """The answer to a delete of an adapter."""
        call = {"operationId": uuid.uuid4().hex, "bootId": "boot-1", "drainSeconds": 5, **query}
        return await self.control.delete(f"/v1/adapters/{name}", params=call)

    async def state(self) -> dict[str, Any]:
        """The state document."""
        answer = await self.control.get("/v1/state")
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    async def wait_state(self, **wanted: Any) -> dict[str, Any]:
        """The state document, once these fields have these values."""
        document: dict[str, Any] = {}

        async def reached() -> bool:
            document.update(await self.state())
            return all(document[name] == value for name, value in wanted.items())

        await self.wait_for(reached)
        return document

    async def wait_held(self, count: int) -> None:
        """Returns when so many requests wait until the model serves."""

        async def held() -> bool:
            return bool((await self.state())["held"]["current"] == count)

        await self.wait_for(held)

    async def wait_tasks(self, before: set[asyncio.Task[Any]]) -> None:
        """Returns when no task is left that was not there before."""

        async def gone() -> bool:
            return asyncio.all_tasks() - before <= {asyncio.current_task()}

        await self.wait_for(gone)

    async def wait_for(self, check: Callable[[], Awaitable[bool]]) -> None:
        """Let the event loop turn until `check` holds."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if await check():
                    return
                await asyncio.sleep(0)


@asynccontextmanager
async def serving_edge(*, token_path: Path | None = None, model: ModelInfo | None = None, **settings: Any) -> AsyncIterator[Edge]:
    """An edge whose engine has started and is ended afterwards; `model` is what its ranks say that they loaded."""
    group = FakeRankGroup(settings.get("ranks", 1))
    group.model = model or group.model
    edge = Edge(group, token_path=token_path, **settings)
    await edge.engine.start()
    try:
        yield edge
    finally:
        edge.ranks.stepping.set()
        edge.ranks.calling.set()
        async with asyncio.timeout(DEADLINE_S):
            await edge.engine.terminate()


def _client(application: Any) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=application, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://worker")


def image_scope() -> dict[str, Any]:
    """What an ASGI server says of an image request."""
    return {
        "type": "http",
        "method": "POST",
        "path": "/v1/images/generations",
        "raw_path": b"/v1/images/generations",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("worker", 80),
    }
