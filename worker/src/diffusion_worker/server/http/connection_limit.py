# SPDX-License-Identifier: Apache-2.0
"""The bound on connections of the data port. Probes and metrics are answered beyond it, as a full worker is alive.

uvicorn's own bound refuses probes as well, so a cluster would restart a worker for being busy.
"""

import asyncio
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.server.metrics.families import counter, gauge
from diffusion_worker.server.schemas.problems import error_answer

EXEMPT = frozenset({"/healthz", "/readyz", "/health", "/metrics"})
# Suggested wait: connections close as clients read their answers.
RETRY_AFTER_S = 5.0
# Connections beyond the bound that may be open at once, each for one answer. The oldest is aborted for the next.
MOST_BEYOND = 64


class ConnectionLimit:
    """The count of one port's connections, at most `most` of which are served as usual.

    A connection beyond them gets one answer, an error unless it asks for a path of EXEMPT, and ends.
    """

    def __init__(self, application: Starlette, most: int) -> None:
        self.most = most
        self.open = 0
        self.refused = 0
        self._application = application
        # Connections beyond the bound, the oldest first.
        self._beyond: dict[asyncio.Transport, None] = {}

    def opened(self, transport: asyncio.Transport) -> bool:
        """Count an opened connection; return whether it is within the bound.

        If more than `MOST_BEYOND` connections are beyond it, the oldest of those is aborted.
        """
        self.open += 1
        if self.open - len(self._beyond) <= self.most:
            return True
        self._beyond[transport] = None
        if len(self._beyond) > MOST_BEYOND:
            next(iter(self._beyond)).abort()
        return False

    def closed(self, transport: asyncio.Transport) -> None:
        """Uncount a closed connection."""
        self.open -= 1
        self._beyond.pop(transport, None)

    def only_probes(self, served: ASGIApp) -> ASGIApp:
        """Wrap the application of a connection beyond the bound: serve probes and metrics, refuse other paths, close after one answer."""

        async def answered(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_last(message: Message) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message)["Connection"] = "close"
                await send(message)

            if scope["type"] == "http" and scope["path"].rstrip("/") not in EXEMPT:
                await self._refuse(scope, receive, send_last)
            else:
                await served(scope, receive, send_last)

        return answered

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.refused += 1
        scope["app"] = self._application
        message = f"connections: expected at most {self.most} (--max-connections), found more"
        error = RequestError(ErrorCode.OVERLOADED, message, retry_after_s=RETRY_AFTER_S)
        await error_answer(error, Request(scope))(scope, receive, send)


class ConnectionCollector(Collector):
    """The connections of the data port as metrics."""

    def __init__(self, limit: ConnectionLimit) -> None:
        self._limit = limit

    def collect(self) -> Iterator[Metric]:
        """Yield all families; called by the registry."""
        yield gauge("connections", "Open connections of the data port, those beyond connections_max among them.", self._limit.open)
        yield gauge(
            "connections_max",
            "Most connections of the data port that are served as usual, --max-connections; those beyond get only probes and metrics.",
            self._limit.most,
        )
        yield counter(
            "connections_refused",
            "Requests refused with 429 because they came over a connection beyond connections_max.",
            self._limit.refused,
        )
