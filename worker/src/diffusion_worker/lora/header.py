# SPDX-License-Identifier: Apache-2.0
"""The header of a safetensors file, checked before any tensor is read; without torch, so that a process that fetches can use it.

The file is eight bytes with the header's length, the header (JSON: a dtype, a shape and a range of bytes for each tensor, and a
table of strings named `__metadata__`), then the tensors' bytes. A header is believed only when all of it fits: each range is as
long as its shape says, and together they cover the rest of the file once, without holes.
"""

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from diffusion_worker.errors import ErrorCode, RequestError

# Trainers keep statistics of their data sets in the metadata: some hundred KB. This bounds what parsing takes.
MAX_HEADER_BYTES = 16 << 20
# Far over any adapter: rank 256 of a model of 12 billion parameters in float32 is 4 GB.
MAX_FILE_BYTES = 16 << 30
# Each takes a table and two lists in the header. Adapters have up to some thousand; more would take long to make objects of.
MAX_TENSORS = 20_000
MAX_NAME_LENGTH = 512
MAX_DIMENSIONS = 8
LENGTH_BYTES = 8
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
# All that a file may hold; which of them an adapter may is for its reader.
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_NAME = re.compile(r"[A-Za-z0-9_.:-]+")
_BEGINNINGS = (
    (b"PK\x03\x04", ErrorCode.UNSUPPORTED_FORMAT, "a zip or PyTorch pickle file; pickle can run code and is never read"),
    (b"\x80\x02", ErrorCode.UNSUPPORTED_FORMAT, "a pickle file; pickle can run code and is never read"),
    (b"\x80\x03", ErrorCode.UNSUPPORTED_FORMAT, "a pickle file; pickle can run code and is never read"),
    (b"\x80\x04", ErrorCode.UNSUPPORTED_FORMAT, "a pickle file; pickle can run code and is never read"),
    (b"\x80\x05", ErrorCode.UNSUPPORTED_FORMAT, "a pickle file; pickle can run code and is never read"),
    (b"GGUF", ErrorCode.UNSUPPORTED_FORMAT, "a GGUF file"),
    (b"\x89HDF", ErrorCode.UNSUPPORTED_FORMAT, "an HDF5 file"),
    (b"version https://git-lfs", ErrorCode.INVALID_ADAPTER, "a pointer of git-lfs, not the file it stands for"),
    (b"<", ErrorCode.INVALID_ADAPTER, "a page of HTML or XML"),
)


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor: `begin` and `end` are counted in bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class AdapterHeader(msgspec.Struct, frozen=True):
    """What a file says of itself; `data_start` is where its tensors begin, `size_bytes` the file's size."""

    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]
    data_start: int
    size_bytes: int


def read_header(path: str | Path, *, name: str | None = None) -> AdapterHeader:
    """The checked header of a file; nothing after it is read. `name` is for messages, the path without one.

    Raises:
        RequestError: InvalidAdapter, or UnsupportedFormat for a pickle.
    """
    label = f"adapter {name or str(path)!r}"
    descriptor = open_file(Path(path), label)
    try:
        return parse_header(*read_beginning(descriptor, label), label=label)
    finally:
        os.close(descriptor)


def open_file(path: Path, label: str) -> int:
    """A descriptor of a regular file; whatever could block or has no end is refused."""
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise RequestError(
            ErrorCode.UNSUPPORTED_FORMAT,
            f"{label}: expected a .safetensors file, found {path.suffix}; pickle can run code and is never read",
        )
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise _invalid(f"{label}: {path.name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _invalid(f"{label}: {path.name} is no regular file")
    return descriptor


def read_beginning(descriptor: int, label: str) -> tuple[bytes, int]:
    """The length and the header of an open file as they are, and the file's size; the descriptor is then at the tensors."""
    size = os.fstat(descriptor).st_size
    beginning = os.read(descriptor, LENGTH_BYTES)
    if len(beginning) < LENGTH_BYTES:
        raise _invalid(f"{label}: expected a safetensors file, found {size} bytes")
    length = int.from_bytes(beginning, "little")
    if not 2 <= length <= min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise _no_header(beginning, length, size, label)
    if size > MAX_FILE_BYTES:
        raise _invalid(f"{label}: its {size} bytes are over the limit of {MAX_FILE_BYTES}")
    header = os.read(descriptor, length)
    if len(header) < length:
        raise _invalid(f"{label}: the file became shorter while it was read")
    return beginning + header, size


def _no_header(beginning: bytes, length: int, size: int, label: str) -> RequestError:
    """What else the file is, where that can be told; only asked then, since a length may look like the beginning of anything."""
    for magic, code, what in _BEGINNINGS:
        if beginning.startswith(magic[:LENGTH_BYTES]):
            return RequestError(code, f"{label}: expected a safetensors file, found {what}")
    if 2 <= length <= size - LENGTH_BYTES:
        return _invalid(f"{label}: its header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
    return _invalid(f"{label}: is no safetensors file, or is cut: its header claims {length} bytes, the file has {size}")


def parse_header(beginning: bytes, size_bytes: int, *, label: str) -> AdapterHeader:
    """Check what `read_beginning` read of a file of `size_bytes`.

    Raises:
        RequestError: InvalidAdapter with the first tensor that is not as it should be.
    """
    document = _decode(beginning[LENGTH_BYTES:], label)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _invalid(f"{label}: __metadata__ of its header is no table of strings")
    tensors = {name: _entry(name, value, label) for name, value in document.items()}
    _check_ranges(tensors, size_bytes - len(beginning), label)
    return AdapterHeader(metadata=metadata, tensors=tensors, data_start=len(beginning), size_bytes=size_bytes)


def shown(name: str) -> str:
    """A name out of a file as it may stand in a message: short, and without characters that act."""
    return name if len(name) <= 160 and _NAME.fullmatch(name) else ascii(name[:160])


def _decode(data: bytes, label: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise _invalid(f"{label}: its header has {shown(twice)} twice")
        return table

    if data.count(b"{") > MAX_TENSORS or data.count(b"[") > 2 * MAX_TENSORS:
        raise _invalid(f"{label}: its header has more tables or lists than {MAX_TENSORS} tensors need")
    try:
        document = json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, a number of thousands of digits
        raise _invalid(f"{label}: its header is no JSON: {str(error)[:120]}") from None
    if not isinstance(document, dict):
        raise _invalid(f"{label}: its header is no JSON object")
    return document


def _entry(name: str, value: Any, label: str) -> TensorEntry:
    """One tensor of the header, when what it says fits together."""
    if len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name) or ".." in name:
        raise _invalid(f"{label}: {shown(name)} is no name of a tensor")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _invalid(f"{label}: {name}: expected dtype, shape and data_offsets in the header, found {ascii(value)[:120]}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    item = ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
    if item is None:
        raise _invalid(f"{label}: {name}: {ascii(dtype)[:120]} is no dtype")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise _invalid(f"{label}: {name}: {ascii(shape)[:120]} is no shape")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _invalid(f"{label}: {name}: {ascii(offsets)[:120]} are no data_offsets")
    begin, end = offsets
    if end - begin != math.prod(shape) * item:
        raise _invalid(f"{label}: {name}: {dtype} {shape} takes {math.prod(shape) * item} bytes, its data_offsets have {end - begin}")
    return TensorEntry(dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _are_sizes(values: Any) -> bool:
    if not isinstance(values, list) or not {int}.issuperset(map(type, values)):
        return False
    return not values or (min(values) >= 0 and max(values) <= MAX_FILE_BYTES)


def _check_ranges(tensors: Mapping[str, TensorEntry], data_bytes: int, label: str) -> None:
    """The ranges follow each other from the first byte of the data to the last."""
    at = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            what = "overlaps the tensor before it" if entry.begin < at else "leaves a hole before it"
            raise _invalid(f"{label}: {name}: its data_offsets [{entry.begin}, {entry.end}] are wrong: it {what}, which ends at {at}")
        if entry.end > data_bytes:
            raise _invalid(f"{label}: {name}: ends at byte {entry.end} of {data_bytes}: the file is cut, or its header lies")
        at = entry.end
    if at != data_bytes:
        raise _invalid(f"{label}: its tensors take {at} bytes, but {data_bytes} follow the header")


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ADAPTER, message)
