# SPDX-License-Identifier: Apache-2.0
"""Memory that processes share by a descriptor, and that nobody can change any more once it is sealed."""

import fcntl
import mmap
import os
from collections.abc import Callable

import torch

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def write_sealed(path: str, size: int, write: Callable[[torch.Tensor], None]) -> None:
    """Give the empty memory at a path its size, have it written, and seal it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        # It can be sealed only when nobody has it mapped to write.
        with mmap.mmap(descriptor, size) as mapped:
            buffer = torch.frombuffer(mapped, dtype=torch.uint8)
            write(buffer)
            del buffer
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    finally:
        os.close(descriptor)


def map_sealed(path: str, size: int) -> torch.Tensor:
    """Map sealed memory to read it; it stays as long as the tensor.

    Raises:
        OSError: it is not there. ValueError: it is not sealed, or of another size.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found, seals = os.fstat(descriptor).st_size, fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if found != size or seals & SEALS != SEALS:
            raise ValueError(f"expected {size} sealed bytes, found {found} with seals {seals:#x}")
        # Torch keeps no descriptor, of which a rank may have few. Nothing writes to what it maps, which would be a copy.
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=False, size=size, dtype=torch.uint8)
    finally:
        os.close(descriptor)
