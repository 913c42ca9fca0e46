# SPDX-License-Identifier: Apache-2.0
"""An adapter's weights file: its header, then in memory: read once, and its digest, tensors and values checked.

The digest is of exactly the bytes that the tensors lie in. A file in place may change at any time, so nothing is read twice.
"""

import hashlib
import itertools
import math
import operator
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.header import (
    ITEM_BYTES,
    AdapterHeader,
    TensorEntry,
    open_file,
    parse_header,
    read_beginning,
)

FACTOR_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
# Some trainers write alpha as a whole number.
ALPHA_DTYPES = FACTOR_DTYPES | {"I64": torch.int64, "I32": torch.int32}
CHUNK_BYTES = 1 << 20


class AdapterFile(NamedTuple):
    """The bytes of a file, all of them read; the tensors are views of one buffer, of which hashing may still go on."""

    header: AdapterHeader
    hashed: Future[str]
    tensors: dict[str, torch.Tensor]

    @property
    def digest(self) -> str:
        """sha256 of all bytes; waits for it."""
        return self.hashed.result()


class OpenWeights:
    """An open weights file of which the header was read and checked. Use as a context manager; `read` at most once."""

    def __init__(self, path: Path, label: str, *, root: Path | None = None) -> None:
        """Raises RequestError: InvalidAdapter with the first tensor that is wrong; UnsupportedFormat for a pickle."""
        self._label = f"{label}: {path.name}"
        self._descriptor = open_file(path, self._label, root=root)
        try:
            self._beginning, size = read_beginning(self._descriptor, self._label)
            self.header = parse_header(self._beginning, size, label=self._label)
            _check_dtypes(self.header, self._label)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._alphas: dict[str, torch.Tensor] = {}

    def __enter__(self) -> "OpenWeights":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def stand_ins(self) -> dict[str, torch.Tensor]:
        """Tensors without values in the place of those of the file, but for alphas, which are a few bytes each.

        Raises:
            RequestError: InvalidAdapter for an alpha that is not finite.
        """
        found = {name: torch.empty(entry.shape, dtype=ALPHA_DTYPES[entry.dtype], device="meta") for name, entry in self._entries()}
        self._alphas = {name: self._alpha(name, entry) for name, entry in self._entries() if _is_alpha(name, entry)}
        return found | self._alphas

    def read(self) -> AdapterFile:
        """Read the rest and check all of its values.

        Raises:
            RequestError: InvalidAdapter with the first tensor that is wrong.
        """
        digest = hashlib.sha256()
        # Beside all that is done with the tensors: it takes as long, and lets other threads run meanwhile.
        hashing = ThreadPoolExecutor(max_workers=1)
        try:
            hashing.submit(digest.update, self._beginning)
            size = self.header.size_bytes - self.header.data_start
            buffer = _read_rest(self._descriptor, size, lambda chunk: hashing.submit(digest.update, chunk), self._label)
            hashed = hashing.submit(lambda: f"sha256:{digest.hexdigest()}")
        finally:
            hashing.shutdown(wait=False)
        views = {dtype: _numbers(buffer, dtype) for dtype in {entry.dtype for _, entry in self._entries()}}
        tensors = {name: _view(buffer, views[entry.dtype], entry) for name, entry in self._entries()}
        _check_finite(self.header, tensors, buffer, self._label)
        if any(not torch.equal(tensors[name], alpha) for name, alpha in self._alphas.items()):
            raise _invalid(f"{self._label}: the file changed while it was read")
        tensors = {name: _at_most_single(name, tensor, self._label) for name, tensor in tensors.items()}
        return AdapterFile(self.header, hashed, tensors)

    def _entries(self) -> Iterable[tuple[str, TensorEntry]]:
        return self.header.tensors.items()

    def _alpha(self, name: str, entry: TensorEntry) -> torch.Tensor:
        try:
            data = os.pread(self._descriptor, entry.end - entry.begin, self.header.data_start + entry.begin)
        except OSError as error:
            raise _invalid(f"{self._label}: {name} cannot be read: {error.strerror}") from None
        if len(data) != entry.end - entry.begin:
            raise _invalid(f"{self._label}: the file became shorter while it was read")
        alpha = torch.frombuffer(bytearray(data), dtype=ALPHA_DTYPES[entry.dtype]).view(entry.shape)
        if not _is_finite(alpha):
            raise _invalid(f"{self._label}: {name} has values that are not finite")
        return alpha


def _is_alpha(name: str, entry: TensorEntry) -> bool:
    return name.endswith(".alpha") and math.prod(entry.shape) == 1


def _read_rest(descriptor: int, size: int, hash_chunk: Callable[[memoryview], object], label: str) -> torch.Tensor:
    """The rest of an open file; each chunk is given away to be hashed when it is there."""
    buffer = torch.empty(size, dtype=torch.uint8)
    view = memoryview(buffer.numpy())  # type: ignore[arg-type]
    at = 0
    while at < size:
        try:
            count = os.readv(descriptor, [view[at : at + CHUNK_BYTES]])
        except OSError as error:
            raise _invalid(f"{label}: cannot be read at byte {at}: {error.strerror}") from None
        if not count:
            raise _invalid(f"{label}: the file became shorter while it was read: {at} of {size} bytes")
        hash_chunk(view[at : at + count])
        at += count
    if os.read(descriptor, 1):
        raise _invalid(f"{label}: the file became longer while it was read")
    return buffer


def _check_dtypes(header: AdapterHeader, label: str) -> None:
    for name, entry in header.tensors.items():
        allowed = ALPHA_DTYPES if name.endswith(".alpha") else FACTOR_DTYPES
        if entry.dtype not in allowed:
            raise _invalid(f"{label}: {name}: expected {', '.join(FACTOR_DTYPES)}, found {entry.dtype}")


def _numbers(buffer: torch.Tensor, dtype: str) -> torch.Tensor:
    """All bytes looked at as numbers of a dtype, but for what is left over."""
    kind = ALPHA_DTYPES[dtype]
    return buffer[: len(buffer) - len(buffer) % kind.itemsize].view(kind)


def _view(buffer: torch.Tensor, numbers: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    item = numbers.dtype.itemsize
    if entry.begin % item:  # only aligned bytes can be looked at as numbers
        return buffer[entry.begin : entry.end].clone().view(numbers.dtype).view(entry.shape)
    shape = entry.shape
    if len(shape) != 2:
        return numbers[entry.begin // item : entry.end // item].view(shape)
    # Nearly all of them, some hundred: one call of torch each.
    return numbers.as_strided(shape, (shape[1], 1), entry.begin // item)


def _check_finite(header: AdapterHeader, tensors: dict[str, torch.Tensor], buffer: torch.Tensor, label: str) -> None:
    """Runs of one dtype, which are one pass over memory; then tensor by tensor to name the first that is wrong."""
    in_order = sorted(header.tensors.values(), key=operator.attrgetter("begin"))
    groups = [(dtype, list(group)) for dtype, group in itertools.groupby(in_order, key=operator.attrgetter("dtype"))]
    runs = [(dtype, group[0].begin, group[-1].end) for dtype, group in groups]
    aligned = all(begin % ITEM_BYTES[dtype] == 0 for dtype, begin, _ in runs)
    if aligned and all(_is_finite(buffer[begin:end].view(ALPHA_DTYPES[dtype])) for dtype, begin, end in runs):
        return
    for name, tensor in tensors.items():
        if not _is_finite(tensor):
            raise _invalid(f"{label}: {name} has values that are not finite")


def _at_most_single(name: str, tensor: torch.Tensor, label: str) -> torch.Tensor:
    """No layer computes in double precision; what is too large without it is infinite."""
    if tensor.dtype is not torch.float64:
        return tensor
    tensor = tensor.float()
    if not _is_finite(tensor):
        raise _invalid(f"{label}: {name} has values that are not finite in F32")
    return tensor


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is infinite or no number; the extremes tell, since no number is both of them."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ADAPTER, message)
