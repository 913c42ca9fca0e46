# SPDX-License-Identifier: Apache-2.0
"""Memory that weights live in: one block whose pages go back on sleep while every view of it stays valid.

On a CPU a slab is a private anonymous mapping with huge pages, freed by MADV_DONTNEED, which measured faster than the alternatives. On an
accelerator it is one storage that is resized to nothing and back.
"""

import ctypes
import mmap
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

HUGE_PAGE = 2 << 20

AddressRange = tuple[int, int]


class Slab(Protocol):
    """Device memory, seen as a uint8 tensor; `address_range` is None on an accelerator."""

    size: int
    bytes: torch.Tensor
    address_range: AddressRange | None

    def lend(self, tensor: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Make a tensor see a part of `bytes`, at the latest when the slab has memory for the first time."""

    def release(self) -> None:
        """Give the memory back; the contents are lost, views stay. Harmless where there is none."""

    def restore(self) -> None:
        """Have memory again, contents undefined; raises MemoryError or torch's own error where there is none."""


class HostSlab:
    """A slab of the CPU as a device. It takes no memory before it is written to."""

    def __init__(self, size: int) -> None:
        self.size = size
        length = -(-size // HUGE_PAGE) * HUGE_PAGE
        # Further addresses of another kind, never touched. Without them the kernel joins neighbouring slabs into one mapping, and counts
        # their memory together.
        self._mapping = mmap.mmap(-1, length + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._mapping.madvise(mmap.MADV_HUGEPAGE, 0, length)
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.address_range: AddressRange | None = (whole.data_ptr(), whole.data_ptr() + length)
        self.bytes = whole[:size]

    def lend(self, tensor: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        tensor.data = part(self.bytes)

    def release(self) -> None:
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """Nothing to do: pages come back when they are written, and are zero before."""


class DeviceSlab:
    """A slab of an accelerator. The storage object stays the same for ever, so that views of it stay valid after every sleep.

    A slab made `released` has no memory before its first `restore`. A view needs existing memory, so borrowers get their parts then.
    """

    address_range: AddressRange | None = None

    def __init__(self, size: int, device: torch.device, *, released: bool = False) -> None:
        self.size = size
        self.bytes = torch.empty(0 if released else size, dtype=torch.uint8, device=device)
        self._waiting: list[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = []

    def lend(self, tensor: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.bytes.numel() == self.size:
            tensor.data = part(self.bytes)
        else:
            self._waiting.append((tensor, part))

    def release(self) -> None:
        self.bytes.untyped_storage().resize_(0)

    @torch.inference_mode(False)
    def restore(self) -> None:
        storage = self.bytes.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.size)
        if self.bytes.numel() != self.size:
            self.bytes = self.bytes.new_empty(0).set_(storage, 0, (self.size,))  # type: ignore[call-overload]
        while self._waiting:
            tensor, part = self._waiting.pop()
            tensor.data = part(self.bytes)


def make_slab(size: int, device: torch.device, *, released: bool = False) -> Slab:
    """A slab of `size` bytes on a device; a `released` one holds nothing before `restore`."""
    return HostSlab(size) if device.type == "cpu" else DeviceSlab(size, device, released=released)


def blank(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of one element of memory that looks like one of a shape, until a slab lends it its part."""
    return torch.empty((), dtype=dtype).expand(shape).detach()


def resident_bytes(slabs: Iterable[Slab]) -> int:
    """Bytes the slabs hold right now: pages of their mappings that the kernel says are there, and device storages."""
    return sum(_held(slab) for slab in slabs)


def _held(slab: Slab) -> int:
    if slab.address_range is None:
        return slab.bytes.untyped_storage().nbytes()
    begin, end = slab.address_range
    pages = torch.empty((end - begin) // mmap.PAGESIZE, dtype=torch.uint8)
    # A byte for each page, of which a bit counts. The file /proc/self/smaps has this for the whole process, in a hundred times the time.
    if _libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_void_p(pages.data_ptr())):
        raise OSError(ctypes.get_errno(), "mincore")
    return int((pages & 1).sum()) * mmap.PAGESIZE


_libc = ctypes.CDLL(None, use_errno=True)
