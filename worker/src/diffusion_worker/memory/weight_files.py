# SPDX-License-Identifier: Apache-2.0
"""A safetensors file: names and positions of its tensors, checked against its size before a byte of them is read.

A file stays open while one of its tensors is referenced. Putting another file in its place changes nothing here; writing to it is detected.
"""

import math
import mmap
import os
import weakref
from pathlib import Path
from typing import NamedTuple

import torch

from diffusion_worker.errors import ConfigError
from diffusion_worker.memory.safetensors_layout import LENGTH_BYTES, read_layout

# The format's own bound for the header, which is JSON and holds names, shapes and offsets only.
MOST_HEADER_BYTES = 100_000_000
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class WeightFile:
    """An open file of weights."""

    def __init__(self, path: Path) -> None:
        """Open a file and read its header; raise ConfigError where it cannot be read, or differs from its header."""
        self.path = path
        self._mapped: torch.Tensor | None = None
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self.descriptor)
            self._stamp = self._look()
            self.size = self._stamp[0]
            self.tensors = self._read_header(self.size)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None

    def check_unchanged(self) -> None:
        """Compare the open file's size and modification time with those at opening; raise ConfigError if either differs."""
        if self._look() != self._stamp:
            raise ConfigError(f"{self.path}: was written to since it was opened, expected a file that stays as it is")

    def read_exactly(self, buffers: list[memoryview], start: int) -> None:
        """Read from offset `start` of the file until every buffer is full, in order; raise ConfigError at an early end of the file."""
        missing = [buffer for buffer in buffers if buffer.nbytes]
        while missing:
            count = os.preadv(self.descriptor, missing, start)
            if count == 0:
                raise ConfigError(f"{self.path}: expected {sum(b.nbytes for b in missing)} more bytes at {start}, found the file's end")
            start += count
            while missing and count >= missing[0].nbytes:
                count -= missing.pop(0).nbytes
            if count:
                missing[0] = missing[0][count:]

    def mapped(self) -> torch.Tensor:
        """Map the whole file into private memory and return its bytes; only pages that are touched are read."""
        if self._mapped is None:
            self._mapped = torch.frombuffer(mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        return self._mapped

    def unmap(self) -> None:
        """Drop the mapping that `mapped` made; its memory goes with the last tensor that views it."""
        self._mapped = None

    def drop_pages(self) -> None:
        """Drop the file's pages from the system's cache, except those that another process has mapped."""
        self.unmap()
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _look(self) -> tuple[int, int]:
        found = os.fstat(self.descriptor)
        return found.st_size, found.st_mtime_ns

    def _read_header(self, size: int) -> dict[str, "StoredTensor"]:
        if size < LENGTH_BYTES:
            raise ConfigError(f"{self.path}: expected a safetensors file, found {size} bytes, too few for one")
        length = int.from_bytes(os.pread(self.descriptor, LENGTH_BYTES, 0), "little")
        if length > min(size - LENGTH_BYTES, MOST_HEADER_BYTES):
            raise ConfigError(f"{self.path}: expected a safetensors file, found a header of {length} bytes in a file of {size}")
        try:
            layout = read_layout(os.pread(self.descriptor, LENGTH_BYTES + length, 0), size)
        except ValueError as error:
            raise ConfigError(f"{self.path}: expected a complete safetensors file, found {size} bytes: {error}") from None
        tensors, start = {}, LENGTH_BYTES + length
        for name, entry in layout.tensors.items():
            if entry.dtype not in DTYPES:
                raise ConfigError(f"{self.path}: tensor {name}: expected one of the dtypes {', '.join(DTYPES)}, found {entry.dtype}")
            tensors[name] = StoredTensor(self, name, start, DTYPES[entry.dtype], torch.Size(entry.shape))
            start += tensors[name].nbytes
        return tensors


class StoredTensor(NamedTuple):
    """A tensor in a file, whose first byte is at `start`."""

    file: WeightFile
    name: str
    start: int
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize
