# SPDX-License-Identifier: Apache-2.0
"""Memory that weights live in: one block whose pages are given back on sleep while every view of it stays valid.

On a CPU a slab is a private anonymous mapping with huge pages, freed by MADV_DONTNEED, the fastest of the ways that were measured. On an
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
        """Make a tensor the view that `part` makes of the slab's bytes, at the latest when the slab first has memory."""

    def release(self) -> None:
        """Give the memory back. The contents are lost and views stay valid; without memory nothing happens."""

    def restore(self) -> None:
        """Take memory again, with undefined contents; raise MemoryError or torch's own error where there is none."""


class HostSlab:
    """A slab on a CPU: anonymous memory of this process, in huge pages if the system grants them.

    A page takes memory from its first write on.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        length = -(-size // HUGE_PAGE) * HUGE_PAGE
        # The addresses past `length` have other flags and are never touched. Without them the kernel joins neighbouring slabs into one
        # mapping, and counts their memory together.
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
        """Return at once: the system gives a released page back, zeroed, at its next use."""


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
    """Make a slab of `size` bytes on a device; a `released` one has no memory before `restore`."""
    return HostSlab(size) if device.type == "cpu" else DeviceSlab(size, device, released=released)


def blank(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor that looks like one of this shape and takes the memory of one element, until a slab lends it a part."""
    return torch.empty((), dtype=dtype).expand(shape).detach()


def resident_bytes(slabs: Iterable[Slab]) -> int:
    """Return the bytes that slabs hold now: resident pages of their mappings, and device storages."""
    return sum(_held(slab) for slab in slabs)


def _held(slab: Slab) -> int:
    if slab.address_range is None:
        return slab.bytes.untyped_storage().nbytes()
    begin, end = slab.address_range
    pages = torch.empty((end - begin) // mmap.PAGESIZE, dtype=torch.uint8)
    # The result has a byte for each page, of which the lowest bit counts. The file /proc/self/smaps lists the whole process, and takes a
    # hundred times as long to read.
    if _libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_void_p(pages.data_ptr())):
        raise OSError(ctypes.get_errno(), "mincore")
    return int((pages & 1).sum()) * mmap.PAGESIZE


_libc = ctypes.CDLL(None, use_errno=True)
