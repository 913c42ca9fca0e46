# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy on loopback that can stop forwarding what the server says: to the connections that there are, as a load balancer that
lost them, or to all of them, as a server that stands still.

What clients say always arrives: the server does what it is asked for and nobody hears of it, which is harder than silence both ways.
It understands nothing of what it carries, so TLS goes through it.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

CHUNK = 65536


class StallingProxy:
    """In front of one server; a context manager with a thread of its own, so that the test may block."""

    def __init__(self, kubeconfig: Path) -> None:
        """The server is the one that it names."""
        self._document = json.loads(kubeconfig.read_text())
        parts = urlsplit(self._document["clusters"][0]["cluster"]["server"])
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self._silent = False
        self._flowing: dict[asyncio.Event, asyncio.Task[None] | None] = {}
        """A connection each."""
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def stall(self) -> None:
        """The connections that there are hear no more from the server; new ones do."""
        self._do(self._stall)

    def silence(self) -> None:
        """No connection hears from the server any more, new ones included."""
        self._silent = True
        self.stall()

    def resume(self) -> None:
        """All go on, with what was kept back."""
        self._silent = False
        self._do(self._resume)

    def kubeconfig(self, folder: Path) -> Path:
        """Of a client that goes through here; the server's certificate is good for every port of its address."""
        self._document["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{self.port}"
        made = folder / "kubeconfig-through-proxy"
        made.write_text(json.dumps(self._document))
        return made

    # in the thread ----------------------------------------------------------------------------------------------------

    def _do(self, what: Callable[[], Awaitable[None]]) -> None:
        async def done() -> None:
            await what()

        asyncio.run_coroutine_threadsafe(done(), self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        tasks = [task for task in self._flowing.values() if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _stall(self) -> None:
        for flowing in self._flowing:
            flowing.clear()

    async def _resume(self) -> None:
        for flowing in self._flowing:
            flowing.set()

    async def _carry(self, client_says: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        flowing = asyncio.Event()
        if not self._silent:
            flowing.set()
        self._flowing[flowing] = asyncio.current_task()
        try:
            server_says, to_server = await asyncio.open_connection(*self._target)
            try:
                await _until_one_ends(_pump(client_says, to_server), _pump(server_says, to_client, flowing))
            finally:
                to_server.close()
        except (OSError, asyncio.CancelledError):
            pass  # a server that is not there, or the end of the test
        finally:
            to_client.close()
            del self._flowing[flowing]


async def _until_one_ends(*pumps: Awaitable[None]) -> None:
    tasks = [asyncio.ensure_future(one) for one in pumps]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event | None = None) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            if flowing is not None:
                await flowing.wait()
            writer.write(data)
            await writer.drain()
