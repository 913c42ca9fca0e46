# SPDX-License-Identifier: Apache-2.0
"""Memory that processes share by a descriptor, and that nobody can change any more once it is sealed."""

import fcntl
import mmap
import os
from collections.abc import Callable

import torch

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def write_sealed(path: str, size: int, write: Callable[[torch.Tensor], None]) -> None:
    """Set the size of the empty memory at a path, call `write` with its bytes, and seal it: nobody can change it afterwards.

    It stays unsealed if `write` raises.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        # Memory can be sealed only while nobody has it mapped for writing.
        with mmap.mmap(descriptor, size) as mapped:
            buffer = torch.frombuffer(mapped, dtype=torch.uint8)
            write(buffer)
            del buffer
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    finally:
        os.close(descriptor)


def map_sealed(path: str, size: int) -> torch.Tensor:
    """Map sealed memory for reading; it stays mapped as long as the tensor exists.

    Raises:
        OSError: it is not there. ValueError: it is not sealed, or of another size.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found, seals = os.fstat(descriptor).st_size, fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if found != size or seals & SEALS != SEALS:
            raise ValueError(f"expected {size} sealed bytes of shared memory, found {found} with seals {seals:#x}")
        # torch keeps no descriptor open, of which a rank may have few. The mapping is private, and nothing writes to it.
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=False, size=size, dtype=torch.uint8)
    finally:
        os.close(descriptor)
