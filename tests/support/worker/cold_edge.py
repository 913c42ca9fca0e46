# SPDX-License-Identifier: Apache-2.0
"""An edge whose model sleeps until a test lets it wake, and clients of it whose streams are read event by event."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2

from support.worker.server_edge import DEADLINE_S, Edge, image_scope, serving_edge


def desired(folder: Path, policy: str = "OnIdle", **cold: Any) -> str:
    """The mounted file with a policy and limits of held requests."""
    path = folder / "desired.json"
    replacement = path.with_suffix(".new")
    replacement.write_text(json.dumps({"sleep": {"policy": policy}, "coldRequests": cold}))
    replacement.rename(path)
    return str(path)


@contextlib.asynccontextmanager
async def sleeping_edge(
    folder: Path, policy: str = "OnIdle", *, settings: dict[str, Any] | None = None, **cold: Any
) -> AsyncIterator[Edge]:
    """An edge whose model sleeps, and whose ranks answer no call until `edge.ranks.calling` is set."""
    async with serving_edge(desired_path=desired(folder, policy, **cold), **(settings or {})) as edge:
        await fall_asleep(edge)
        yield edge


async def fall_asleep(edge: Edge) -> None:
    if edge.engine.state != "asleep":
        await edge.operate("sleep")
        await edge.wait_state(state="asleep", operation=None)
    edge.ranks.calling.clear()


def code(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


class Client:
    """A request for a stream whose messages are read one by one."""

    def __init__(self, edge: Edge) -> None:
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._content = [json.dumps({"prompt": "p", "stream": True, "num_inference_steps": 2}).encode()]
        self.gone = asyncio.Event()
        self._answering = asyncio.create_task(edge.data_application(image_scope(), self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._content:
            return {"type": "http.request", "body": self._content.pop(), "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self._sent.put_nowait(message)

    async def status(self) -> int:
        """Of the answer, when it begins."""
        async with asyncio.timeout(DEADLINE_S):
            return int((await self._sent.get())["status"])

    async def event(self) -> dict[str, Any]:
        """The next event, past signs of life."""
        text = ""
        while not (text.startswith("event: ") and text.endswith("\n\n")):
            async with asyncio.timeout(DEADLINE_S):
                text += (await self._sent.get())["body"].decode()
            text = text.removeprefix(": keep-alive\n\n")
        found: dict[str, Any] = json.loads(text.partition("data: ")[2])
        return found

    async def sign_of_life(self) -> None:
        """Returns when one comes."""
        async with asyncio.timeout(DEADLINE_S):
            while (await self._sent.get())["body"] != b": keep-alive\n\n":
                pass

    async def end(self) -> None:
        """Returns when the application is through with the request."""
        async with asyncio.timeout(DEADLINE_S):
            await self._answering
