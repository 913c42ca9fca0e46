# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware of both ports: a body over the limit is refused, before it is read where its length is declared."""

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.server.problems import error_answer


class BodyLimit:
    """Refuses bodies of more than `max_bytes`."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._message = f"the body: expected at most {max_bytes} bytes, found more"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The HTTP parser lets nothing but digits through.
        if int(Headers(scope=scope).get("content-length", "0")) > self._max_bytes:
            error = RequestError(ErrorCode.INVALID_REQUEST, self._message, details={"field": "body"})
            answer = error_answer(error, request=Request(scope), status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            await answer(scope, receive, send)
            return
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                # Of all exceptions from here FastAPI lets only this kind through.
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._message)
            return message

        await self._app(scope, receive_counted, send)
