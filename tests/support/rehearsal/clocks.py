# SPDX-License-Identifier: Apache-2.0
"""The order of work on streams, by vector clocks: streams, events and the host each know how far every stream is done.

Work on a stream follows what the stream knew when the work was queued, and what the host knew: the host queues it. A value is read safely
only by those who know the work that wrote it.
"""

from typing import NamedTuple

import torch

from support.rehearsal.records import Records


class Moment(NamedTuple):
    """A piece of work: the `count`-th of a stream."""

    stream: int
    count: int


class Clock(dict[int, int]):
    """The pieces of work that are known to be done, by stream."""

    def learn(self, other: "Clock") -> None:
        """Add the pieces of work that `other` knows to be done. Nothing is forgotten, and `other` stays as it is."""
        for stream, count in other.items():
            self[stream] = max(self.get(stream, 0), count)

    def knows(self, moment: Moment) -> bool:
        """Return whether this piece of work is known to be done."""
        return self.get(moment.stream, 0) >= moment.count


class Clocks:
    """The clocks of the host and of all streams. Storages carry the moments at which they were last written and read."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.host = Clock()
        self.streams: dict[int, Clock] = {0: Clock()}
        self.current = 0

    def new_stream(self) -> int:
        """Add a stream without work, and return its number."""
        self.streams[number := len(self.streams)] = Clock()
        return number

    def queue(self, stream: int | None = None) -> Moment:
        """Queue a piece of work on a stream, by default the current one; return its moment. The stream then knows all that the host
        knows."""
        stream = self.current if stream is None else stream
        clock = self.streams[stream]
        clock.learn(self.host)
        clock[stream] = clock.get(stream, 0) + 1
        return Moment(stream, clock[stream])

    def finish(self, stream: int | None = None) -> None:
        """Note that the host has waited for a stream, by default the current one; nothing waits here."""
        self.host.learn(self.streams[self.current if stream is None else stream])

    def finish_all(self) -> None:
        """Note that the host has waited for all streams; nothing waits here."""
        for clock in self.streams.values():
            self.host.learn(clock)

    def device_reads(self, tensor: torch.Tensor) -> None:
        """Note that the current stream reads a tensor, which is of the device or pinned. Record a race if its last write may not be done
        by then."""
        self._check(tensor, self.streams[self.current], f"stream {self.current} reads")
        tensor.untyped_storage().read_at = self._now()

    def device_writes(self, tensor: torch.Tensor) -> None:
        """Note that the work queued last on the current stream writes a tensor. Nothing is checked."""
        tensor.untyped_storage().written_at = self._now()

    def host_reads(self, tensor: torch.Tensor) -> None:
        """Record a race if the host reads a pinned tensor into which a copy may still be under way."""
        self._check(tensor, self.host, "the host reads")

    def host_writes(self, tensor: torch.Tensor) -> None:
        """Record a race if the host writes to a pinned tensor into or from which a copy may still be under way. The write itself is not
        noted."""
        self._check(tensor, self.host, "the host writes to")
        read = getattr(tensor.untyped_storage(), "read_at", None)
        if read is not None and not self.host.knows(read):
            self._records.race(f"the host writes to {_words(tensor)}, which stream {read.stream} may not have read yet:")

    def _now(self) -> Moment:
        return Moment(self.current, self.streams[self.current].get(self.current, 0))

    def _check(self, tensor: torch.Tensor, clock: Clock, doing: str) -> None:
        written = getattr(tensor.untyped_storage(), "written_at", None)
        if written is not None and not clock.knows(written):
            self._records.race(f"{doing} {_words(tensor)}, which stream {written.stream} may not have written yet:")


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Mark the storage of a tensor of the host as pinned, so views of it count as pinned too; return the same tensor."""
    tensor.untyped_storage().is_pinned_here = True
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of the host counts as pinned."""
    return getattr(tensor.untyped_storage(), "is_pinned_here", False)


def _words(tensor: torch.Tensor) -> str:
    return f"a tensor {tuple(tensor.shape)} of {tensor.dtype}"
