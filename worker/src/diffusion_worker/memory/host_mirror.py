# SPDX-License-Identifier: Apache-2.0
"""A copy of a slab in host memory that an accelerator reads by itself: filled at load, so that sleep copies nothing.

The chunks have powers of two as sizes, because pinned blocks are rounded up to one. A single block of 33 GB would take 64.
"""

import contextlib
import logging
from collections.abc import Iterator

import torch

from diffusion_worker.memory.device_memory import available_bytes

MOST_CHUNK_BYTES = 1 << 30
LEAST_CHUNK_BYTES = 1 << 22

log = logging.getLogger(__name__)

HOST = torch.device("cpu")


class HostMirror:
    """A mirror of `size` bytes. Pinned for an accelerator; without one (`pinned` false) the same in plain memory."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        self._chunks = [torch.empty(count, dtype=torch.uint8, pin_memory=pinned) for count in chunk_sizes(size)]

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        return sum(chunk.numel() for chunk in self._chunks)

    def take(self, content: torch.Tensor, *, start: int = 0) -> None:
        """Copy bytes of the slab, which lie there from `start` on."""
        for mine, theirs in self._pairs(content, start):
            mine.copy_(theirs)

    def read(self, into: torch.Tensor, *, start: int) -> None:
        """Copy the bytes from `start` on to host memory."""
        for mine, theirs in self._pairs(into, start):
            theirs.copy_(mine)

    def give(self, slab: torch.Tensor) -> None:
        """Copy everything to the slab, a chunk at a time, on the stream that is current; returns before that is over."""
        for mine, theirs in self._pairs(slab, 0):
            theirs.copy_(mine, non_blocking=True)

    def _pairs(self, content: torch.Tensor, start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of chunks, and the parts of `content` that belong there."""
        pairs, begin, stop = [], 0, start + content.numel()
        for chunk in self._chunks:
            low, high = max(begin, start), min(begin + chunk.numel(), stop)
            if low < high:
                pairs.append((chunk[low - begin : high - begin], content[low - start : high - start]))
            begin += chunk.numel()
        return pairs


def chunk_sizes(size: int) -> list[int]:
    """Powers of two that hold `size` bytes together, the largest first."""
    sizes, left = [], size
    while left > 0:
        fitting = 1 << (left.bit_length() - 1)
        sizes.append(max(LEAST_CHUNK_BYTES, min(MOST_CHUNK_BYTES, fitting)))
        left -= sizes[-1]
    return sizes


def make_mirror(size: int, *, pinned: bool) -> HostMirror | None:
    """A mirror of `size` bytes; None where the host has no room for it, and files have to do."""
    found = available_bytes(HOST)
    if found < size:
        log.warning("no mirror of %d bytes of weights in host memory, which has %d: waking will read their files", size, found)
        return None
    return HostMirror(size, pinned=pinned)


@contextlib.contextmanager
def copying_to(device: torch.device) -> Iterator[None]:
    """While copies to a device are queued: on a stream of their own there, whose work is over at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
