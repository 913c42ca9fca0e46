# SPDX-License-Identifier: Apache-2.0
"""A worker extension that spoils what a rank holds by one bit, as a defect of the memory would, or leaves it no memory.

Tests load it into real ranks by `support.worker.corrupting_extension:Corrupting`. The fingerprint has to see each change.
"""

import os
from pathlib import Path
from typing import Any

import torch

from diffusion_worker.memory import device_memory


class Corrupting:
    """One bit at a time, on one rank or on all."""

    _rank: int
    model_runner: Any

    def flip_weight(self, only_rank: int | None = None, number: int = 0) -> None:
        """In a tensor on the device, the first one unless told otherwise."""
        if only_rank in (None, self._rank):
            flip(self.model_runner.weights.tensors()[number])

    def flip_adapter(self, lora_int_id: int, only_rank: int | None = None) -> None:
        """In what is kept of an adapter in host memory."""
        if only_rank in (None, self._rank):
            flip(self.model_runner.loras.host_copies()[lora_int_id][1][0])

    def flip_mirror(self, only_rank: int | None = None) -> None:
        """In what is in host memory to fill the weights from again, as it is in no file."""
        if only_rank in (None, self._rank):
            flip(next(placed.kept for placed in self.model_runner.weights._placed if placed.kept is not None))

    def limit_memory(self, cgroup: str, only_rank: int | None = None) -> None:
        """Have a folder in the place of the kernel's, whose files say how much memory a rank may have and has."""
        if only_rank in (None, self._rank):
            device_memory.CGROUP = Path(cgroup)


def write_limit(cgroup: Path, *, free_bytes: int) -> None:
    """The files of such a folder, in which so much is left."""
    used = 1 << 30
    (cgroup / "memory.max").write_text(f"{used + free_bytes}\n")
    (cgroup / "memory.current").write_text(f"{used}\n")
    (cgroup / "memory.stat").write_text("inactive_file 0\nactive_file 0\n")


def flip(tensor: torch.Tensor) -> None:
    """The lowest bit of the last byte of a contiguous tensor."""
    assert tensor.is_contiguous()
    with torch.inference_mode():
        tensor.detach().view(-1).view(torch.uint8)[-1] ^= 1


def flip_in_file(path: Path, at: int = -1) -> None:
    """A bit of a file, whose times are put back: by them it was never written to."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
