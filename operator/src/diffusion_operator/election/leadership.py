# SPDX-License-Identifier: Apache-2.0
"""The answer to "may this process write now?", and the end of what is under way when it may no longer."""

import asyncio
from collections.abc import Callable
from types import TracebackType

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

    def passage(self) -> "Passage":
        """Around a write or a call. Raises NotLeading where it may not begin, or may not go on."""
        return Passage(self)

    def require(self) -> None:
        """Raise NotLeading if this process may not write now."""
        if not self.is_open:
            raise NotLeading

    def begin(self) -> asyncio.Timeout:
        """Return the limit of what begins now. Raises NotLeading where it may not."""
        self.require()
        limit = asyncio.timeout_at(self._until)
        self._under_way.add(limit)
        return limit

    def end(self, limit: asyncio.Timeout) -> None:
        """Take note that it is over."""
        self._under_way.discard(limit)

    def _cut_at(self, when: float) -> None:
        for cut in self._under_way:
            if not cut.expired():
                cut.reschedule(when)


class Passage:
    """A write or a call that is under way. A class, because a generator takes a kilobyte for each worker that is watched."""

    __slots__ = ("_leadership", "_limit")

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership

    async def __aenter__(self) -> None:
        self._limit = self._leadership.begin()
        await self._limit.__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leadership.end(self._limit)
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            raise NotLeading from None
        if isinstance(error, TimeoutError) and self._limit.expired():
            raise NotLeading from None
