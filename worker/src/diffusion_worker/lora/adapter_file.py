# SPDX-License-Identifier: Apache-2.0
"""An adapter's weights file: its header is checked first, then all bytes are read once, hashed and checked.

The digest is computed from the very bytes in memory that become tensors, because a file in place may change at any time.
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
    """A file that was read completely. The tensors are views of one buffer, whose hashing may still go on."""

    header: AdapterHeader
    hashed: Future[str]
    tensors: dict[str, torch.Tensor]

    @property
    def digest(self) -> str:
        """The `sha256:<hex>` of all bytes; waits until it is computed."""
        return self.hashed.result()


class OpenWeights:
    """An open weights file whose header was read and checked. Use it as a context manager, and call `read` at most once."""

    def __init__(self, path: Path, label: str, *, root: Path | None = None) -> None:
        """Open a file, and read and check its header; messages begin with `label`.

        Raises:
            RequestError: InvalidAdapter with the first tensor that is wrong; UnsupportedFormat for a pickle.
        """
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
        """Return the file's tensors without their values, except alphas, which are read because they are a few bytes each.

        Raises:
            RequestError: InvalidAdapter for an alpha that is not finite.
        """
        found = {name: torch.empty(entry.shape, dtype=ALPHA_DTYPES[entry.dtype], device="meta") for name, entry in self._entries()}
        self._alphas = {name: self._alpha(name, entry) for name, entry in self._entries() if _is_alpha(name, entry)}
        return found | self._alphas

    def read(self) -> AdapterFile:
        """Read the rest of the file and check all of its values.

        Raises:
            RequestError: InvalidAdapter with the first tensor that is wrong.
        """
        digest = hashlib.sha256()
        # Hashing takes as long as all work on the tensors and lets other threads run, so it is done beside that work.
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
    """Read the rest of an open file, `size` bytes, and pass each chunk to `hash_chunk`; raises RequestError (InvalidAdapter)."""
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
    """Return a view of all bytes as numbers of a dtype, without an incomplete last number."""
    kind = ALPHA_DTYPES[dtype]
    return buffer[: len(buffer) - len(buffer) % kind.itemsize].view(kind)


def _view(buffer: torch.Tensor, numbers: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    item = numbers.dtype.itemsize
    if entry.begin % item:  # torch views only aligned bytes as numbers
        return buffer[entry.begin : entry.end].clone().view(numbers.dtype).view(entry.shape)
    shape = entry.shape
    if len(shape) != 2:
        return numbers[entry.begin // item : entry.end // item].view(shape)
    # Nearly all tensors, some hundred, are matrices: they take one call of torch each.
    return numbers.as_strided(shape, (shape[1], 1), entry.begin // item)


def _check_finite(header: AdapterHeader, tensors: dict[str, torch.Tensor], buffer: torch.Tensor, label: str) -> None:
    """Raise RequestError (InvalidAdapter) with the first tensor that has a value that is not finite.

    Adjacent tensors of one dtype are checked together, in one pass over memory. After a failure each tensor is checked by itself.
    """
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
    """Convert double precision, in which no layer computes, to single; raise RequestError if a value is then infinite."""
    if tensor.dtype is not torch.float64:
        return tensor
    tensor = tensor.float()
    if not _is_finite(tensor):
        raise _invalid(f"{label}: {name} has values that are not finite in F32")
    return tensor


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no value is infinite or nan. Minimum and maximum suffice, because a nan makes both nan."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ADAPTER, message)
