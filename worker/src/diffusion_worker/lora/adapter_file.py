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
from typing import NamedTuple

import torch

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.header import AdapterHeader, open_file, parse_header, read_beginning

FACTOR_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
# Some trainers write alpha as a whole number.
ALPHA_DTYPES = FACTOR_DTYPES | {"I64": torch.int64, "I32": torch.int32}
CHUNK_BYTES = 1 << 20


class Place(NamedTuple):
    """A tensor's dtype and shape, and its place in a file: bytes `begin` up to `end`, counted from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class AdapterFile(NamedTuple):
    """A file that was read completely, with its tensors by name, whose values are all finite.

    Most are views of one buffer, whose hashing may still go on. Tensors of float64 were converted to float32.
    """

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
        self._alphas: dict[str, torch.Tensor] = {}

    def __enter__(self) -> "OpenWeights":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def stand_ins(self) -> dict[str, torch.Tensor]:
        """Return the file's tensors by name on the meta device, so with shapes and dtypes but no values.

        Alphas of a single number do have their values, which are read here because they are a few bytes each.

        Raises:
            RequestError: InvalidAdapter for an alpha that cannot be read or is not finite.
        """
        found = self._tensors(torch.empty(self.header.size_bytes - self.header.data_start, dtype=torch.uint8, device="meta"))
        self._alphas = {name: self._alpha(name, place) for name, place in self._places.items() if _is_alpha(name, place)}
        return found | self._alphas

    def read(self) -> AdapterFile:
        """Read all tensors and require finite values. The digest is computed on a thread meanwhile, which is not waited for.

        Raises:
            RequestError: InvalidAdapter for the first tensor with a value that is not finite, or for a file that changed or cannot be read.
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
        tensors = self._tensors(buffer)
        _check_finite(self._places, tensors, buffer, self._label)
        if any(not torch.equal(tensors[name], alpha) for name, alpha in self._alphas.items()):
            raise _invalid(f"{self._label}: the file changed while it was read")
        double = [name for name, place in self._places.items() if place.dtype is torch.float64]
        return AdapterFile(self.header, hashed, tensors | {name: _to_single(name, tensors[name], self._label) for name in double})

    def _tensors(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return all tensors by name from `buffer`, which has all bytes after the header: as views, or as copies if not aligned."""
        numbers = {dtype: _numbers(buffer, dtype) for dtype in {place.dtype for place in self._places.values()}}
        return {name: _view(buffer, numbers[place.dtype], place) for name, place in self._places.items()}

    def _alpha(self, name: str, place: Place) -> torch.Tensor:
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


def _is_alpha(name: str, place: Place) -> bool:
    return name.endswith(".alpha") and math.prod(place.shape) == 1


def _read_rest(descriptor: int, size: int, hash_chunk: Callable[[memoryview], object], label: str) -> torch.Tensor:
    """Read the rest of an open file into a new tensor, and pass each chunk to `hash_chunk` as well.

    Raises:
        RequestError: InvalidAdapter if the file cannot be read, or if the rest is not exactly `size` bytes.
    """
    buffer = torch.empty(size, dtype=torch.uint8)
    view = memoryview(buffer.numpy())  # type: ignore[arg-type]
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
    return buffer


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


def _view(buffer: torch.Tensor, numbers: torch.Tensor, place: Place) -> torch.Tensor:
    item = numbers.dtype.itemsize
    if place.begin % item:  # torch views only aligned bytes as numbers
        return buffer[place.begin : place.end].clone().view(numbers.dtype).view(place.shape)
    shape = place.shape
    if len(shape) != 2:
        return numbers[place.begin // item : place.end // item].view(shape)
    # Nearly all tensors, some hundred, are matrices: they take one call of torch each.
    return numbers.as_strided(shape, (shape[1], 1), place.begin // item)


def _check_finite(places: Mapping[str, Place], tensors: dict[str, torch.Tensor], buffer: torch.Tensor, label: str) -> None:
    """Raise RequestError (InvalidAdapter) with the first tensor of `tensors` that has a value that is not finite.

    Adjacent tensors of one dtype are checked together, in one pass over memory. If that fails, or a run of them is not aligned to its
    dtype, all tensors are checked one by one.
    """
    groups = [(dtype, list(group)) for dtype, group in itertools.groupby(places.values(), key=operator.attrgetter("dtype"))]
    runs = [(dtype, group[0].begin, group[-1].end) for dtype, group in groups]
    aligned = all(begin % dtype.itemsize == 0 for dtype, begin, _ in runs)
    if aligned and all(_is_finite(buffer[begin:end].view(dtype)) for dtype, begin, end in runs):
        return
    for name, tensor in tensors.items():
        if not _is_finite(tensor):
            raise _invalid(f"{label}: tensor {name} has values that are not finite")


def _to_single(name: str, tensor: torch.Tensor, label: str) -> torch.Tensor:
    """Convert double precision, in which no layer computes, to single; raise RequestError if a value is then infinite."""
    tensor = tensor.float()
    if not _is_finite(tensor):
        raise _invalid(f"{label}: tensor {name} is F64, and has values that are too large for F32, to which it is converted")
    return tensor


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no value is infinite or nan; True for an empty tensor and for whole numbers.

    Minimum and maximum suffice, because a nan makes both nan.
    """
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ADAPTER, message)
