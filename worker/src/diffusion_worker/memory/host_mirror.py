# SPDX-License-Identifier: Apache-2.0
"""A copy of a slab in host memory that an accelerator reads by itself, made before the first sleep that needs it.

A mirror is memory of one process, or a part of memory that all ranks of a pod share. The sizes of a process's own chunks are powers of two,
because pinned blocks are rounded up to one. A single block of 33 GB would take 64 GB.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.memory.shared_memory import SharedMemory

MOST_CHUNK_BYTES = 1 << 30
LEAST_CHUNK_BYTES = 1 << 22
# Parts of shared memory begin at a page.
PART_BYTES = 1 << 12


class HostMirror:
    """A mirror in these chunks of bytes, one after the other. `shared` is the memory that they are parts of, if processes share it."""

    def __init__(self, chunks: Sequence[torch.Tensor], shared: SharedMemory | None = None) -> None:
        self._chunks = list(chunks)
        # The memory stays registered with the device as long as a mirror refers to it.
        self.shared = shared

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


def own_mirrors(sizes: Iterable[int], *, pinned: bool) -> list[HostMirror]:
    """Make a mirror of each size in new memory of this process, without contents; `pinned` is for an accelerator."""
    return [HostMirror([torch.empty(count, dtype=torch.uint8, pin_memory=pinned) for count in chunk_sizes(size)]) for size in sizes]


def shared_mirrors(sizes: Iterable[int], memory: SharedMemory) -> list[HostMirror]:
    """Make a mirror of each size from consecutive parts of `memory`, which must have at least `shared_bytes(sizes)` bytes."""
    mirrors, begin = [], 0
    for size in sizes:
        mirrors.append(HostMirror([memory.bytes[begin : begin + size]], memory))
        begin += shared_bytes([size])
    return mirrors


def own_bytes(sizes: Iterable[int]) -> int:
    """Return the host memory that `own_mirrors` of these sizes take."""
    return sum(sum(chunk_sizes(size)) for size in sizes)


def shared_bytes(sizes: Iterable[int]) -> int:
    """Return the host memory that `shared_mirrors` of these sizes take, once for all processes."""
    return sum(-(-size // PART_BYTES) * PART_BYTES for size in sizes)


def chunk_sizes(size: int) -> list[int]:
    """Cut `size` bytes into chunks of a power of two, each from LEAST_CHUNK_BYTES to MOST_CHUNK_BYTES; the last may be part empty."""
    sizes, left = [], size
    while left > 0:
        fitting = 1 << (left.bit_length() - 1)
        sizes.append(max(LEAST_CHUNK_BYTES, min(MOST_CHUNK_BYTES, fitting)))
        left -= sizes[-1]
    return sizes


def require_room(needed: int, found: int, *, ranks: int = 1) -> None:
    """Refuse mirrors that `ranks` need together and that do not fit into free host memory, before the first byte of them is allocated.

    Raises:
        RequestError: InsufficientMemory, with both numbers.
    """
    if needed > found:
        message = (
            f"a mirror of the weights in host memory needs {needed} bytes for {ranks} ranks together, found {found} bytes free in the pod"
        )
        raise RequestError(ErrorCode.INSUFFICIENT_MEMORY, message, details={"neededBytes": needed, "foundBytes": found})


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
