# SPDX-License-Identifier: Apache-2.0
"""The requests of the data port that wait for their answer, by their `X-Request-ID`, so that somebody can cancel them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class RunningRequests:
    """Every generating route registers here. Clients choose ids freely, so one may stand for several requests."""

    def __init__(self) -> None:
        self._cancelled: dict[str, list[asyncio.Event]] = {}

    @contextmanager
    def running(self, request_id: str) -> Iterator[asyncio.Event]:
        """While it is entered, the event is set by whoever cancels the request."""
        cancelled = asyncio.Event()
        self._cancelled.setdefault(request_id, []).append(cancelled)
        try:
            yield cancelled
        finally:
            self._cancelled[request_id].remove(cancelled)
            if not self._cancelled[request_id]:
                del self._cancelled[request_id]

    def cancel(self, request_id: str) -> bool:
        """Cancel what runs under an id; False where nothing does."""
        found = self._cancelled.get(request_id, [])
        for cancelled in found:
            cancelled.set()
        return bool(found)
