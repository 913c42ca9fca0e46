# SPDX-License-Identifier: Apache-2.0
"""A copy of a slab in host memory that an accelerator reads by itself: filled at load, so that sleep copies nothing.

The sizes of its chunks are powers of two, because pinned blocks are rounded up to one. A single block of 33 GB would take 64 GB.
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
    """A mirror of `size` bytes: in pinned memory for an accelerator, in plain memory with `pinned` false."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        self._chunks = [torch.empty(count, dtype=torch.uint8, pin_memory=pinned) for count in chunk_sizes(size)]

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        return sum(chunk.numel() for chunk in self._chunks)

    def take(self, content: torch.Tensor, *, start: int = 0) -> None:
        """Copy `content`, which are bytes of the slab from `start` on, into the mirror."""
        for mine, theirs in self._pairs(content, start):
            mine.copy_(theirs)

    def read(self, into: torch.Tensor, *, start: int) -> None:
        """Copy the mirror's bytes from `start` on into a tensor in host memory."""
        for mine, theirs in self._pairs(into, start):
            theirs.copy_(mine)

    def give(self, slab: torch.Tensor) -> None:
        """Queue copies of everything to the slab, chunk by chunk, on the current stream; return before they are done."""
        for mine, theirs in self._pairs(slab, 0):
            theirs.copy_(mine, non_blocking=True)

    def _pairs(self, content: torch.Tensor, start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Match `content`, the slab's bytes from `start` on, with the chunks that cover it; return equally long views of both."""
        pairs, begin, stop = [], 0, start + content.numel()
        for chunk in self._chunks:
            low, high = max(begin, start), min(begin + chunk.numel(), stop)
            if low < high:
                pairs.append((chunk[low - begin : high - begin], content[low - start : high - start]))
            begin += chunk.numel()
        return pairs


def chunk_sizes(size: int) -> list[int]:
    """Cut `size` bytes into chunks of a power of two, each from LEAST_CHUNK_BYTES to MOST_CHUNK_BYTES; the last may be part empty."""
    sizes, left = [], size
    while left > 0:
        fitting = 1 << (left.bit_length() - 1)
        sizes.append(max(LEAST_CHUNK_BYTES, min(MOST_CHUNK_BYTES, fitting)))
        left -= sizes[-1]
    return sizes


def make_mirror(size: int, *, pinned: bool) -> HostMirror | None:
    """Make a mirror of `size` bytes; return None where the host has no room, so that a wake reads files."""
    found = available_bytes(HOST)
    if found < size:
        log.warning("no mirror of the weights in host memory, wakes will read their files: expected %d bytes, found %d free", size, found)
        return None
    return HostMirror(size, pinned=pinned)


@contextlib.contextmanager
def copying_to(device: torch.device) -> Iterator[None]:
    """Put copies made in this context on a stream of their own, if the device has streams; wait for them at its end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
