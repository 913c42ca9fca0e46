# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware of the data port: an id for every request, one log line and one observation for every image request."""

import logging
import re
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffusion_worker.errors import ErrorCode
from diffusion_worker.server.http.replica import draw_id
from diffusion_worker.server.metrics.page import ROUTES, Metrics
from diffusion_worker.server.schemas.problems import REPLICA, REQUEST_ID

# A client's own id is kept if it is harmless in a header and in a log.
CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

log = logging.getLogger(__name__)


class RequestLog:
    """ASGI middleware that adds `X-Request-ID`, the client's if that is harmless, and `X-Replica` to every answer.

    A request to an image route is logged and counted when it ends, in success or not. No prompt is read.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, replica: str) -> None:
        self._app = app
        self._metrics = metrics
        self._replica = replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if CLIENT_ID.fullmatch(given) else draw_id(self._replica)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID], headers[REPLICA] = request_id, self._replica
            await send(message)

        started = time.monotonic()
        finished = False
        try:
            await self._app(scope, receive, send_with_id)
            finished = True
        finally:
            if scope["path"] in ROUTES:
                code = str(state.get("error_code", "OK" if finished else ErrorCode.ENGINE_FAILED))
                seconds = time.monotonic() - started
                self._metrics.observe_request(scope["path"], code, seconds)
                log.info("image request request_id=%s code=%s seconds=%.3f", request_id, code, seconds)
