# SPDX-License-Identifier: Apache-2.0
"""A listener's connection with limits that uvicorn lacks: a deadline for heads of requests, and a bound that spares probes.

Without the deadline a client that sends a byte of a header now and then, or nothing at all, holds its connection for ever.
"""

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from diffusion_worker.server.http.connection_limit import ConnectionLimit

# The timeout of common proxies; a kept connection has longer until the first byte of its next request.
HEAD_TIMEOUT_S = 60.0
# Deadline of a connection beyond the bound: a probe sends its request as soon as it is connected.
BEYOND_HEAD_TIMEOUT_S = 5.0


class BoundedConnection(H11Protocol):
    """A connection that closes itself if a head is not complete in time, counted from its opening or from the head's first byte.

    With a `limit` the connection is counted there, and beyond that bound it serves only probes and metrics.
    """

    head_timeout_s: float = HEAD_TIMEOUT_S
    # None: any number of connections.
    limit: ClassVar[ConnectionLimit | None] = None
    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limit is not None:
            self._count(self.limit, transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.limit is not None:
            self.limit.closed(self.transport)
        self._unwatch_head()

    def _count(self, limit: ConnectionLimit, transport: asyncio.Transport) -> None:
        """Count the connection; if there are too many, let it serve only probes and metrics, with a shorter deadline for the head."""
        if not limit.opened(transport):
            self.app = limit.only_probes(self.app)
            self.head_timeout_s = min(self.head_timeout_s, BEYOND_HEAD_TIMEOUT_S)

    def _watch_head(self) -> None:
        """Stop the deadline while a request is in progress, else start it unless it runs already; past it the connection is closed.

        The rest of a refused body counts as a head.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch_head()
        elif self._head_due is None:
            self._head_due = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _unwatch_head(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None
