# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware of both ports: bodies have a size, and a time to arrive in.

A body over the limit is refused before it is read where its length is declared. A slow one may continue while it is faster than a modem. A
client that sends a byte now and then holds a connection and the received part of its body.
"""

import asyncio
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.server.schemas.problems import CLIENT_CLOSED_REQUEST, error_answer

PAYLOAD_TOO_LARGE = 413
REQUEST_TIMEOUT = 408

# The time for a body: a grace period, and one second more for every so many bytes received.
GRACE_S = 20.0
SLOWEST_BYTES_PER_S = 16_384


class BodyLimit:
    """ASGI middleware that refuses bodies over `max_bytes`, or over their path's limit in `larger` (413), and too slow ones (408).

    A body may take `grace_s`, and a second more for each `SLOWEST_BYTES_PER_S` received.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, *, larger: Mapping[str, int] | None = None, grace_s: float = GRACE_S) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._larger = larger or {}
        self._grace_s = grace_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_bytes = self._larger.get(scope["path"], self._max_bytes)
        # The HTTP parser lets only digits through.
        if int(Headers(scope=scope).get("content-length", "0")) > max_bytes:
            error = RequestError(ErrorCode.INVALID_REQUEST, _too_large(max_bytes), details={"field": "body"})
            await error_answer(error, Request(scope), status=PAYLOAD_TOO_LARGE)(scope, receive, send)
            return
        await self._app(scope, _Body(receive, max_bytes, self._grace_s).receive, send)


class _Body:
    """The messages of one request's body. `receive` raises HTTPException for a body that is too large, too slow or cut off.

    FastAPI passes on no other exception from here.
    """

    def __init__(self, receive: Receive, max_bytes: int, grace_s: float) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._grace_s = grace_s
        self._started_s = asyncio.get_running_loop().time()
        self._received = 0
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:
            # Only the client's disconnect can follow, and waiting for it may take as long as the answer.
            return await self._receive()
        message = await self._next_part()
        if message["type"] == "http.disconnect":
            raise HTTPException(CLIENT_CLOSED_REQUEST, "the client closed its connection before its whole body arrived")
        self._received += len(message.get("body", b""))
        if self._received > self._max_bytes:
            raise HTTPException(PAYLOAD_TOO_LARGE, _too_large(self._max_bytes))
        self._complete = not message.get("more_body", False)
        return message

    async def _next_part(self) -> Message:
        allowed_s = self._grace_s + self._received / SLOWEST_BYTES_PER_S
        try:
            async with asyncio.timeout_at(self._started_s + allowed_s):
                return await self._receive()
        except TimeoutError:
            found = f"found {self._received} bytes and no end after {allowed_s:.1f} s"
            raise HTTPException(REQUEST_TIMEOUT, f"the body: expected at least {SLOWEST_BYTES_PER_S} bytes a second, {found}") from None


def _too_large(max_bytes: int) -> str:
    return f"the body: expected at most {max_bytes} bytes, found more"
