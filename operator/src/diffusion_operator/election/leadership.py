# SPDX-License-Identifier: Apache-2.0
"""The answer to "may this process write now?", and the end of what is under way when it may no longer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from diffusion_operator.errors import NotLeading


class Leadership:
    """Closed until the elector opens it, and open for ten seconds from each renewal."""

    def __init__(self) -> None:
        self.epoch: int | None = None
        """Sent with every control call. None: there is no election."""
        self.lost = 0
        """Leads that were lost."""
        self.highest_reported = 0
        """The highest epoch that a worker has seen, as far as one reported."""
        self._renewed_at = 0.0
        self._until: float | None = 0.0
        """On the clock of the event loop. None: for ever."""
        self._under_way: set[asyncio.Timeout] = set()
        self._clock: Callable[[], float] = lambda: 0.0  # until there is a loop

    @classmethod
    def for_ever(cls) -> "Leadership":
        """Return that of an operator without election."""
        made = cls()
        made._until = None
        return made

    @property
    def is_open(self) -> bool:
        """Asked from the thread of the metrics server, too."""
        return self._until is None or self._clock() < self._until

    @property
    def renewed_ago_s(self) -> float:
        """Seconds since the last renewal; 0 for a process that does not lead."""
        return self._clock() - self._renewed_at if self._until is not None and self.is_open else 0.0

    def open(self, epoch: int, *, renewed_at: float, until: float) -> None:
        """Let what is under way go on until then."""
        self._clock = asyncio.get_running_loop().time
        self.epoch, self._renewed_at, self._until = epoch, renewed_at, until
        self._cut_at(until)

    def close(self) -> None:
        """End what is under way."""
        self._until = 0.0
        self._cut_at(0.0)

    def report(self, epoch: int) -> None:
        """Take the epoch that a worker says it has seen."""
        self.highest_reported = max(self.highest_reported, epoch)

    @asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        """Around a write or a call. Raises NotLeading where it may not begin, or may not go on."""
        if not self.is_open:
            raise NotLeading
        cut = asyncio.timeout_at(self._until)
        try:
            async with cut:
                self._under_way.add(cut)
                try:
                    yield
                finally:
                    self._under_way.discard(cut)
        except TimeoutError:
            if cut.expired():
                raise NotLeading from None
            raise

    def _cut_at(self, when: float) -> None:
        for cut in self._under_way:
            if not cut.expired():
                cut.reschedule(when)
