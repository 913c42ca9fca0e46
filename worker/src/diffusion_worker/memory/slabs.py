# SPDX-License-Identifier: Apache-2.0
"""Memory that weights live in: one block whose pages go back on sleep while every view of it stays valid.

On a CPU a slab is a private anonymous mapping with huge pages, given back by MADV_DONTNEED (`performance.md` 4 measured it
against the alternatives); on an accelerator it is one tensor whose storage is resized to nothing and back.
"""

import mmap
from pathlib import Path
from typing import Protocol

import torch

HUGE_PAGE = 2 << 20

AddressRange = tuple[int, int]


class Slab(Protocol):
    """Device memory, seen as a uint8 tensor; `address_range` is None on an accelerator."""

    bytes: torch.Tensor
    address_range: AddressRange | None

    def release(self) -> None:
        """Give the memory back; the contents are lost, views stay."""

    def restore(self) -> None:
        """Have memory again, contents undefined."""


class HostSlab:
    """A slab of the CPU as a device."""

    def __init__(self, size: int) -> None:
        length = -(-size // HUGE_PAGE) * HUGE_PAGE
        # Some addresses more, never touched, of another kind: without them the kernel joins slabs that lie side by side
        # into one mapping, and what it counts for one is what the other holds.
        self._mapping = mmap.mmap(-1, length + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._mapping.madvise(mmap.MADV_HUGEPAGE, 0, length)
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.address_range: AddressRange | None = (whole.data_ptr(), whole.data_ptr() + length)
        self.bytes = whole[:size]

    def release(self) -> None:
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """Nothing to do: pages come back when they are written."""


class DeviceSlab:
    """A slab of an accelerator."""

    address_range: AddressRange | None = None

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)

    def release(self) -> None:
        self.bytes.untyped_storage().resize_(0)
        torch.accelerator.empty_cache()

    def restore(self) -> None:
        self.bytes.untyped_storage().resize_(self._size)


def make_slab(size: int, device: torch.device) -> Slab:
    """A slab of `size` bytes on a device."""
    return HostSlab(size) if device.type == "cpu" else DeviceSlab(size, device)


def resident_bytes(slabs: list[Slab]) -> int:
    """Bytes the slabs hold right now: what the kernel counts as Rss for their mappings, and device storages."""
    ranges = [slab.address_range for slab in slabs if slab.address_range is not None]
    on_device = sum(slab.bytes.untyped_storage().nbytes() for slab in slabs if slab.address_range is None)
    return on_device + (_rss(ranges) if ranges else 0)


def _rss(ranges: list[AddressRange]) -> int:
    """Rss of this process's mappings that overlap one of the ranges."""
    total, inside = 0, False
    with Path("/proc/self/smaps").open() as lines:
        for line in lines:
            head, _, rest = line.partition(" ")
            if not head.endswith(":"):
                low, high = (int(part, 16) for part in head.split("-"))
                inside = any(low < end and start < high for start, end in ranges)
            elif inside and head == "Rss:":
                total += int(rest.split()[0]) * 1024
    return total
