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
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.regular_file import open_regular

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


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """One tensor: `begin` and `end` are counted in bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_FILE_BYTES)]


class _Entry(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One tensor as the header writes it."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


_document = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder = msgspec.json.Decoder(_Entry)
_KEYS = (b'"dtype"', b'"shape"', b'"data_offsets"')


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
        return read_header_of(descriptor, label)
    finally:
        os.close(descriptor)


def read_header_of(descriptor: int, label: str) -> AdapterHeader:
    """The checked header of an open file; raises as `read_header`."""
    return parse_header(*read_beginning(descriptor, label), label=label)


def open_file(path: Path, label: str, *, root: Path | None = None) -> int:
    """A descriptor of a regular file, beneath a root where there is one; whatever could block or has no end is refused."""
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise RequestError(
            ErrorCode.UNSUPPORTED_FORMAT,
            f"{label}: expected a .safetensors file, found {path.suffix}; pickle can run code and is never read",
        )
    return open_regular(path, label, root=root)


def read_beginning(descriptor: int, label: str) -> tuple[bytes, int]:
    """The length and the header of an open file as they are, and the file's size; the descriptor is then at the tensors."""
    try:
        return _read_beginning(descriptor, label)
    except OSError as error:
        raise _invalid(f"{label}: cannot be read: {error.strerror}") from None


def _read_beginning(descriptor: int, label: str) -> tuple[bytes, int]:
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
    try:
        metadata = msgspec.json.decode(document.pop("__metadata__", b"{}"), type=dict[str, str])
    except msgspec.DecodeError:
        raise _invalid(f"{label}: __metadata__ of its header is no table of strings") from None
    tensors = {name: _entry(name, value, label) for name, value in document.items()}
    _check_ranges(tensors, size_bytes - len(beginning), label)
    return AdapterHeader(metadata=metadata, tensors=tensors, data_start=len(beginning), size_bytes=size_bytes)


def shown(name: str) -> str:
    """A name out of a file as it may stand in a message: short, and without characters that act."""
    return name if len(name) <= 160 and _NAME.fullmatch(name) else ascii(name[:160])


def _decode(data: bytes, label: str) -> dict[str, msgspec.Raw]:
    if data.count(b"{") > MAX_TENSORS or data.count(b"[") > 2 * MAX_TENSORS:
        raise _invalid(f"{label}: its header has more tables or lists than {MAX_TENSORS} tensors need")
    try:
        document = _document.decode(data)
        if any(data.count(key) != len(document) - ("__metadata__" in document) for key in _KEYS):
            _refuse_repeated_names(data, label)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _invalid(f"{label}: its header is no JSON object: {str(error)[:120]}") from None
    return document


def _refuse_repeated_names(data: bytes, label: str) -> None:
    """Of a name that is there twice the decoder keeps the last."""

    def unique(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _invalid(f"{label}: its header has {shown(name)} twice")
            seen.add(name)

    json.loads(data.decode(), object_pairs_hook=unique)


def _entry(name: str, raw: msgspec.Raw, label: str) -> TensorEntry:
    """One tensor of the header, when what it says fits together."""
    if len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name) or ".." in name:
        raise _invalid(f"{label}: {shown(name)} is no name of a tensor")
    try:
        entry = _entry_decoder.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise _wrong_entry(name, raw, label) from None
    dtype, shape, (begin, end) = entry.dtype, entry.shape, entry.data_offsets
    item = ITEM_BYTES.get(dtype)
    if item is None:
        raise _invalid(f"{label}: {name}: {ascii(dtype)[:120]} is no dtype")
    if end - begin != math.prod(shape) * item:
        expected = f"{dtype} {list(shape)} takes {math.prod(shape) * item} bytes"
        raise _invalid(f"{label}: {name}: {expected}, its data_offsets have {end - begin}")
    return TensorEntry(dtype=dtype, shape=shape, begin=begin, end=end)


def _wrong_entry(name: str, raw: msgspec.Raw, label: str) -> RequestError:
    """What is wrong with an entry that cannot be decoded."""
    try:
        value = json.loads(bytes(raw))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        return _invalid(f"{label}: {name}: expected dtype, shape and data_offsets in the header, found {ascii(value)[:120]}")
    if not isinstance(value["dtype"], str):
        return _invalid(f"{label}: {name}: {ascii(value['dtype'])[:120]} is no dtype")
    if not _are_sizes(value["shape"]) or len(value["shape"]) > MAX_DIMENSIONS:
        return _invalid(f"{label}: {name}: {ascii(value['shape'])[:120]} is no shape")
    return _invalid(f"{label}: {name}: {ascii(value['data_offsets'])[:120]} are no data_offsets")


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
