# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware of both ports, before all others: HEAD becomes GET, and a path with a slash at its end the one without."""

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadAndSlash:
    """ASGI middleware that hands HEAD on as GET, and a path without the slashes at its end. The server omits the body of a HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # The server reads its own scope for HEAD; the state is of both.
            scope.setdefault("state", {})
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            scope = {**scope, "method": method, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)
