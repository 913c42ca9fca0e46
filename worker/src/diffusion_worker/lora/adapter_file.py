# SPDX-License-Identifier: Apache-2.0
"""An adapter's weights file: its header is checked first, then all bytes are read once, hashed and checked.

The digest is computed from the very bytes in memory that become tensors, because a file in place may change at any time.
"""

import hashlib
import itertools
import math
import operator
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.header import AdapterHeader, open_file, parse_header, read_beginning

FACTOR_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
# Some trainers write alpha as a whole number.
ALPHA_DTYPES = FACTOR_DTYPES | {"I64": torch.int64, "I32": torch.int32}
CHUNK_BYTES = 1 << 20


class Place(msgspec.Struct, frozen=True, gc=False):
    """A tensor's dtype and shape, and its place in a file: bytes `begin` up to `end`, counted from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class OpenWeights:
    """An open weights file whose header was read and checked. Use it as a context manager; call `allocate`, then `read`, once each.

    `tensors` has the file's tensors by name, those of float64 as float32. Before `read` only alphas of a single number have values.
    """

    def __init__(self, path: Path, label: str, *, root: Path | None = None) -> None:
        """Open a file, and read and check its header; messages begin with `label`. With a `root` only a file beneath it is opened.

        Raises:
            RequestError: InvalidAdapter if the file cannot be opened or its header is wrong. UnsupportedFormat for a pickle or another
                known format.
        """
        self._label = f"{label}: {path.name}"
        self._descriptor = open_file(path, self._label, root=root)
        try:
            self._beginning, size = read_beginning(self._descriptor, self._label)
            self.header = parse_header(self._beginning, size, label=self._label)
            self._places = _places_of(self.header, self._label)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._apart: dict[str, Place] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def __enter__(self) -> "OpenWeights":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def allocate(self) -> None:
        """Make `tensors` in memory that `read` fills. The values of alphas are read here, because they are a few bytes each.

        Raises:
            RequestError: InvalidAdapter for an alpha that cannot be read or is not finite.
        """
        # The kernel gives pages when they are written, so names and shapes are judged before the file takes memory.
        self._buffer = torch.empty(self.header.size_bytes - self.header.data_start, dtype=torch.uint8)
        numbers = {dtype: _numbers(self._buffer, dtype) for dtype in {place.dtype for place in self._places.values()}}
        for name, place in self._places.items():
            if _is_alpha(name, place) or _is_copied(place):
                self._apart[name] = place
                self.tensors[name] = self._separate(name, place)
            else:
                self.tensors[name] = _view(numbers[place.dtype], place)

    def read(self) -> Future[str]:
        """Fill all tensors from the file, require finite values, and return the digest of the file, `sha256:<hex>`.

        A thread computes the digest meanwhile, and it is not waited for.

        Raises:
            RequestError: InvalidAdapter for the first tensor with a value that is not finite, or for a file that changed or cannot be read.
        """
        digest = hashlib.sha256()
        # Hashing takes as long as all work on the tensors and lets other threads run, so it is done beside that work.
        hashing = ThreadPoolExecutor(max_workers=1)
        try:
            hashing.submit(digest.update, self._beginning)
            _read_rest(self._descriptor, self._buffer, lambda chunk: hashing.submit(digest.update, chunk), self._label)
            hashed = hashing.submit(lambda: f"sha256:{digest.hexdigest()}")
        finally:
            hashing.shutdown(wait=False)
        _check_finite(self._places, self._buffer, self._label)
        for name, place in self._apart.items():
            self._fill(name, place)
        return hashed

    def _separate(self, name: str, place: Place) -> torch.Tensor:
        """Return a tensor that is no view of the file's bytes: an alpha with its value, else empty memory that `read` fills."""
        if not _is_alpha(name, place):
            return torch.empty(place.shape, dtype=torch.float32 if place.dtype is torch.float64 else place.dtype)
        try:
            data = os.pread(self._descriptor, place.end - place.begin, self.header.data_start + place.begin)
        except OSError as error:
            raise _invalid(f"{self._label}: tensor {name} cannot be read: {error.strerror}") from None
        if len(data) != place.end - place.begin:
            raise _invalid(f"{self._label}: the file became shorter while it was read")
        alpha = torch.frombuffer(bytearray(data), dtype=place.dtype).view(place.shape)
        if not _is_finite(alpha):
            raise _invalid(f"{self._label}: tensor {name} has values that are not finite")
        return alpha

    def _fill(self, name: str, place: Place) -> None:
        """Copy a tensor out of the bytes that were read, or compare an alpha with them; raises RequestError (InvalidAdapter)."""
        values, tensor = _copied(self._buffer, place), self.tensors[name]
        if _is_alpha(name, place):
            if not torch.equal(values, tensor):
                raise _invalid(f"{self._label}: the file changed while it was read")
        elif not _is_finite(tensor.copy_(values)):
            raise _invalid(f"{self._label}: tensor {name} is F64, and has values that are too large for F32, to which it is converted")


def _is_alpha(name: str, place: Place) -> bool:
    return name.endswith(".alpha") and math.prod(place.shape) == 1


def _is_copied(place: Place) -> bool:
    """Return whether a tensor cannot be a view of the file's bytes: torch needs aligned ones, and no layer computes in float64."""
    return place.begin % place.dtype.itemsize != 0 or place.dtype is torch.float64


def _read_rest(descriptor: int, buffer: torch.Tensor, hash_chunk: Callable[[memoryview], object], label: str) -> None:
    """Fill `buffer` with the rest of an open file, and pass each chunk to `hash_chunk` as well.

    Raises:
        RequestError: InvalidAdapter if the file cannot be read, or if the rest has another size than the buffer.
    """
    view, size = memoryview(buffer.numpy()), len(buffer)  # type: ignore[arg-type]
    at = 0
    while at < size:
        try:
            count = os.readv(descriptor, [view[at : at + CHUNK_BYTES]])
        except OSError as error:
            raise _invalid(f"{label}: cannot be read at byte {at} after its header: {error.strerror}") from None
        if not count:
            raise _invalid(f"{label}: the file became shorter while it was read: found {at} of {size} bytes after its header")
        hash_chunk(view[at : at + count])
        at += count
    if os.read(descriptor, 1):
        raise _invalid(f"{label}: the file became longer while it was read")


def _places_of(header: AdapterHeader, label: str) -> dict[str, Place]:
    """Return the places of a file's tensors; raise RequestError (InvalidAdapter) for a dtype that an adapter does not have."""
    places, at = {}, 0
    for name, entry in header.tensors.items():
        dtype = (ALPHA_DTYPES if name.endswith(".alpha") else FACTOR_DTYPES).get(entry.dtype)
        if dtype is None:
            raise _invalid(f"{label}: tensor {name}: expected one of the dtypes {', '.join(FACTOR_DTYPES)}, found {entry.dtype}")
        end = at + math.prod(entry.shape) * dtype.itemsize
        places[name] = Place(dtype, entry.shape, at, end)
        at = end
    assert at == header.size_bytes - header.data_start, "the library refuses a file that its tensors do not fill"
    return places


def _numbers(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a view of all bytes as numbers of a dtype, without an incomplete last number."""
    return buffer[: len(buffer) - len(buffer) % dtype.itemsize].view(dtype)


def _view(numbers: torch.Tensor, place: Place) -> torch.Tensor:
    """Return a tensor as a view of the file's bytes, which are given as numbers of its dtype."""
    shape, first = place.shape, place.begin // place.dtype.itemsize
    if len(shape) != 2:
        return numbers[first : place.end // place.dtype.itemsize].view(shape)
    # Nearly all tensors, some hundred, are matrices: they take one call of torch each.
    return numbers.as_strided(shape, (shape[1], 1), first)


def _copied(buffer: torch.Tensor, place: Place) -> torch.Tensor:
    """Return a tensor as a copy from the file's bytes, which need not be aligned."""
    return buffer[place.begin : place.end].clone().view(place.dtype).view(place.shape)


def _check_finite(places: Mapping[str, Place], buffer: torch.Tensor, label: str) -> None:
    """Raise RequestError (InvalidAdapter) with the first tensor that has a value that is not finite.

    Adjacent tensors of one dtype are checked together, in one pass over memory. If that fails, or a run of them is not aligned to its
    dtype, all tensors are checked one by one.
    """
    groups = [(dtype, list(group)) for dtype, group in itertools.groupby(places.values(), key=operator.attrgetter("dtype"))]
    runs = [(dtype, group[0].begin, group[-1].end) for dtype, group in groups]
    aligned = all(begin % dtype.itemsize == 0 for dtype, begin, _ in runs)
    if aligned and all(_is_finite(buffer[begin:end].view(dtype)) for dtype, begin, end in runs):
        return
    for name, place in places.items():
        if not _is_finite(_copied(buffer, place)):
            raise _invalid(f"{label}: tensor {name} has values that are not finite")


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no value is infinite or nan; True for an empty tensor and for whole numbers.

    Minimum and maximum suffice, because a nan makes both nan.
    """
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ADAPTER, message)
