# SPDX-License-Identifier: Apache-2.0
"""Host memory that the ranks of a pod share: a memory file without a name, mapped by each and registered with its device."""

import contextlib
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

NAME = "weights-mirror"


@contextlib.contextmanager
def new_memory(size: int) -> Iterator[str]:
    """Provide the path of a new memory file of `size` bytes, by which processes of the same user map it while this context lasts.

    It takes memory from the first write on, and goes with the last process that maps it.

    Raises:
        OSError: the system has no descriptor for it.
    """
    descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


class SharedMemory:
    """The memory file at a path, mapped here. For a GPU it is registered with the driver, so that copies to it run beside other work."""

    def __init__(self, path: str, size: int, device: torch.device) -> None:
        """Map `size` bytes.

        Raises:
            OSError: it is not there, or has another size. RuntimeError: the device's driver does not register it.
        """
        found = Path(path).stat().st_size
        if found != size:
            raise OSError(f"{path}: expected {size} bytes of shared memory, found {found}")
        self.bytes = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        if device.type == "cuda":
            register(self.bytes, device)
            # This runs before the memory is unmapped, which happens with the last view of it.
            weakref.finalize(self, _runtime().cudaHostUnregister, self.bytes.data_ptr()).atexit = False


def register(memory: torch.Tensor, device: torch.device) -> None:
    """Have CUDA's driver pin memory of this process for fast copies to a GPU; raise RuntimeError where it refuses."""
    code = int(_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code == 0:
        return
    # CUDA keeps the error for the next launch of a kernel. This launch takes it.
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).zero_()
    raise RuntimeError(f"cudaHostRegister of {memory.nbytes} bytes failed with error {code}")


def _runtime() -> Any:
    """Return torch's binding of the CUDA runtime."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
