# SPDX-License-Identifier: Apache-2.0
"""The answer to "may this process write now?", and the end of what is under way when it may no longer."""

import asyncio
from collections.abc import Callable
from types import TracebackType

from diffusion_operator.errors import NotLeading


class Leadership:
    """The gate for writes and worker calls: closed until `open`, and then open until the time given there."""

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
        """Return a gate for an operator without election: open from the start, and without an epoch."""
        made = cls()
        made._until = None
        return made

    @property
    def is_open(self) -> bool:
        """True while this process may write. The metrics server's thread asks, too."""
        return self._until is None or self._clock() < self._until

    @property
    def renewed_ago_s(self) -> float:
        """Seconds since the last renewal; 0 for a process that does not lead, and without an election."""
        return self._clock() - self._renewed_at if self._until is not None and self.is_open else 0.0

    def open(self, epoch: int, *, renewed_at: float, until: float) -> None:
        """Open the gate until `until`, and let writes and calls under way go on until then.

        Both times are of the event loop's clock. Call it again after each renewal.
        """
        self._clock = asyncio.get_running_loop().time
        self.epoch, self._renewed_at, self._until = epoch, renewed_at, until
        self._cut_at(until)

    def close(self) -> None:
        """Close the gate, and end writes and calls that are under way: each raises NotLeading."""
        self._until = 0.0
        self._cut_at(0.0)

    def report(self, epoch: int) -> None:
        """Note an epoch that a worker has seen; the highest one is kept."""
        self.highest_reported = max(self.highest_reported, epoch)

    def passage(self) -> "Passage":
        """Return the async context manager for a write or call. It raises NotLeading if the gate is closed, or closes meanwhile."""
        return Passage(self)

    def require(self) -> None:
        """Raise NotLeading if this process may not write now."""
        if not self.is_open:
            raise NotLeading

    def begin(self) -> asyncio.Timeout:
        """Return a timeout for a write or call that begins now; it runs out when the gate closes.

        Raises NotLeading if the gate is closed. Give the timeout to `end` afterwards.
        """
        self.require()
        limit = asyncio.timeout_at(self._until)
        self._under_way.add(limit)
        return limit

    def end(self, limit: asyncio.Timeout) -> None:
        """Forget the timeout of a write or call that is over."""
        self._under_way.discard(limit)

    def _cut_at(self, when: float) -> None:
        for cut in self._under_way:
            if not cut.expired():
                cut.reschedule(when)


class Passage:
    """An async context manager around a write or a call: NotLeading if the gate is closed, or closes meanwhile.

    A class, because a generator takes a kilobyte for each worker that is watched.
    """

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
