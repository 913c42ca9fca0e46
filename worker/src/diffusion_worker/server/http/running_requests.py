# SPDX-License-Identifier: Apache-2.0
"""The data port's unanswered requests, by their `X-Request-ID`, and the ways to end them early."""

import asyncio
import hashlib
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.requests import Request

from diffusion_worker.errors import ErrorCode, RequestError

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection, or stopped reading, before it had all of its answer: there is nobody to answer."""


class RunningRequests:
    """The running requests, which every generating route registers. Clients choose ids, so an owner may use the same id several times."""

    def __init__(self) -> None:
        self._cancelled: dict[tuple[bytes, str], list[asyncio.Event]] = {}

    @contextmanager
    def running(self, owner: bytes, request_id: str) -> Iterator[asyncio.Event]:
        """Register a request until the end of the block, and yield an event that is set when the owner cancels the request."""
        cancelled, key = asyncio.Event(), (owner, request_id)
        self._cancelled.setdefault(key, []).append(cancelled)
        try:
            yield cancelled
        finally:
            self._cancelled[key].remove(cancelled)
            if not self._cancelled[key]:
                del self._cancelled[key]

    def cancel(self, owner: bytes, request_id: str) -> bool:
        """Cancel all requests that an owner runs under an id, without waiting for their end; return False if there are none."""
        found = self._cancelled.get((owner, request_id), [])
        for cancelled in found:
            cancelled.set()
        return bool(found)


def owner_of(request: Request) -> bytes:
    """Return a digest of the key that a request was sent with, whether right or wrong. Requests without a key share one digest."""
    return hashlib.sha256(request.headers.get("authorization", "").encode("utf-8", "surrogateescape")).digest()


async def run_cancellable(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on behalf of a request and return its result, unless the client disconnects or its owner cancels the request's id.

    In both cases the work is cancelled and has ended before this raises, so its rows are free by then.

    Raises:
        ClientGone: nobody is there to be answered. RequestError: Cancelled. Any error of the work itself.
    """
    running: RunningRequests = request.app.state.running
    with running.running(owner_of(request), request.state.request_id) as cancelled:
        task = asyncio.create_task(work)
        gone = asyncio.create_task(_disconnected(request))
        ended = asyncio.create_task(cancelled.wait())
        try:
            await asyncio.wait({task, gone, ended}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if ended.done():
                raise RequestError(ErrorCode.CANCELLED, "the request was cancelled by DELETE /v1/requests")
            raise ClientGone
        finally:
            for unfinished in (task, gone, ended):
                unfinished.cancel()
            await asyncio.gather(task, gone, ended, return_exceptions=True)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` and return its result or raise its error; cancel it when the client closes the connection. The body must have been read.

    Raises:
        ClientGone: nobody is there to be answered.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for unfinished in (task, gone):
            unfinished.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Wait until the client is gone; the body was read before, so no other message can arrive."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
