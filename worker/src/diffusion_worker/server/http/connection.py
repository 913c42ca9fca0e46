# SPDX-License-Identifier: Apache-2.0
"""One connection of a listener, with a limit that uvicorn's own has not: the head of a request has a time to arrive in.

Without it a client that sends a byte of a header now and then, or nothing at all, holds its connection for ever.
"""

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

# As long as common proxies wait; a connection that was kept open has longer until the first byte of its next request.
HEAD_TIMEOUT_S = 60.0


class BoundedConnection(H11Protocol):
    """Closes itself where a request was not begun in time: after it was opened, and after the first byte of a next one."""

    head_timeout_s: ClassVar[float] = HEAD_TIMEOUT_S
    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch_head()

    def _watch_head(self) -> None:
        """The time runs from the first byte of a head to its last. What is left of a refused body counts as the next head."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch_head()
        elif self._head_due is None:
            self._head_due = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _unwatch_head(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None
