# SPDX-License-Identifier: Apache-2.0
"""The header of a safetensors file, checked before any tensor is read; without torch, so that a process that fetches can use it.

The file is eight bytes with the header's length, the header, then the tensors' bytes. The header is JSON: a dtype, a shape and a
range of bytes for each tensor, and a table of strings named `__metadata__`. It is accepted only if each range is as long as its
shape says, and all ranges together cover the rest of the file once.
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

# Trainers keep statistics of their data sets in the metadata: some hundred KB. This bounds the memory and time of parsing.
MAX_HEADER_BYTES = 16 << 20
# Far over any adapter: rank 256 of a model of 12 billion parameters in float32 is 4 GB.
MAX_FILE_BYTES = 16 << 30
# Each tensor is a table and two lists in the header. Adapters have up to some thousand; objects for many more would take long to make.
MAX_TENSORS = 20_000
MAX_NAME_LENGTH = 512
MAX_DIMENSIONS = 8
LENGTH_BYTES = 8
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
# Bytes of a number of each dtype that a file may hold; the reader of an adapter allows fewer dtypes.
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_NAME = re.compile(r"[A-Za-z0-9_.:-]+")
_OTHER_FORMATS = (
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
    """A tensor's dtype, shape and byte range in a checked file.

    Add `AdapterHeader.data_start` to `begin` and `end` to get offsets in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_FILE_BYTES)]


class _Entry(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A tensor's entry in the JSON of a header.

    Decoding refuses other fields, over `MAX_DIMENSIONS` dimensions, and sizes over `MAX_FILE_BYTES`.
    """

    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


_document = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder = msgspec.json.Decoder(_Entry)
_KEYS = (b'"dtype"', b'"shape"', b'"data_offsets"')


class AdapterHeader(msgspec.Struct, frozen=True):
    """The checked header of a file; its tensors begin at byte `data_start`, and `size_bytes` is the file's size."""

    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]
    data_start: int
    size_bytes: int


def read_header(path: str | Path, *, name: str | None = None) -> AdapterHeader:
    """Open a safetensors file and parse its header, without reading any tensor.

    `name` stands for the adapter in errors; by default its path does.

    Raises:
        RequestError: InvalidAdapter; UnsupportedFormat for a pickle, GGUF or HDF5 file.
    """
    label = f"adapter {name or str(path)!r}"
    descriptor = open_file(Path(path), label)
    try:
        return read_header_of(descriptor, label)
    finally:
        os.close(descriptor)


def read_header_of(descriptor: int, label: str) -> AdapterHeader:
    """Read and check the header of an open file; raises as `read_header`."""
    return parse_header(*read_beginning(descriptor, label), label=label)


def open_file(path: Path, label: str, *, root: Path | None = None) -> int:
    """Open a regular file, beneath a root if there is one, and return its descriptor.

    Raises:
        RequestError: UnsupportedFormat for a pickle; InvalidAdapter for a pipe or a device, which could block or have no end.
    """
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise RequestError(
            ErrorCode.UNSUPPORTED_FORMAT,
            f"{label}: expected a .safetensors file, found {path.suffix}; pickle can run code and is never read",
        )
    return open_regular(path, label, root=root)


def read_beginning(descriptor: int, label: str) -> tuple[bytes, int]:
    """Read the length and the header of an open file, and return these bytes and the file's size; raises RequestError.

    The descriptor is then at the first tensor. The content of the header is not checked here.
    """
    try:
        return _read_beginning(descriptor, label)
    except OSError as error:
        raise _invalid(f"{label}: cannot be read: {error.strerror}") from None


def _read_beginning(descriptor: int, label: str) -> tuple[bytes, int]:
    size = os.fstat(descriptor).st_size
    beginning = os.read(descriptor, LENGTH_BYTES)
    if len(beginning) < LENGTH_BYTES:
        raise _invalid(f"{label}: expected a safetensors file, found {size} bytes, too few for one")
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
    """Return the error for a file without a usable header, which names the kind of file if its first bytes show it.

    Call it only for such a file, because the length of a good header may look like those bytes.
    """
    for magic, code, what in _OTHER_FORMATS:
        if beginning.startswith(magic[:LENGTH_BYTES]):
            return RequestError(code, f"{label}: expected a safetensors file, found {what}")
    if 2 <= length <= size - LENGTH_BYTES:
        return _invalid(f"{label}: its header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
    return _invalid(
        f"{label}: is not a safetensors file, or is truncated: its first 8 bytes give a header of {length} bytes, the file has {size}"
    )


def parse_header(beginning: bytes, size_bytes: int, *, label: str) -> AdapterHeader:
    """Parse and check the bytes that `read_beginning` read from a file of `size_bytes`.

    Raises:
        RequestError: InvalidAdapter with the first tensor that is wrong.
    """
    document = _decode(beginning[LENGTH_BYTES:], label)
    try:
        metadata = msgspec.json.decode(document.pop("__metadata__", b"{}"), type=dict[str, str])
    except msgspec.DecodeError:
        raise _invalid(f"{label}: __metadata__ of its header is not a table of strings") from None
    tensors = {name: _entry(name, value, label) for name, value in document.items()}
    _check_ranges(tensors, size_bytes - len(beginning), label)
    return AdapterHeader(metadata=metadata, tensors=tensors, data_start=len(beginning), size_bytes=size_bytes)


def shown(name: str) -> str:
    """Return a name from a file for a message: shortened, and with unusual characters escaped."""
    return name if len(name) <= 160 and _NAME.fullmatch(name) else ascii(name[:160])


def _decode(data: bytes, label: str) -> dict[str, msgspec.Raw]:
    if data.count(b"{") > MAX_TENSORS or data.count(b"[") > 2 * MAX_TENSORS:
        raise _invalid(f"{label}: its header has more tables or lists than {MAX_TENSORS} tensors need")
    try:
        document = _document.decode(data)
        if any(data.count(key) != len(document) - ("__metadata__" in document) for key in _KEYS):
            _refuse_repeated_names(data, label)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _invalid(f"{label}: its header is not a JSON object: {str(error)[:120]}") from None
    return document


def _refuse_repeated_names(data: bytes, label: str) -> None:
    """Raise RequestError (InvalidAdapter) for a name that the header has twice; the decoder would keep the last one."""

    def unique(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _invalid(f"{label}: its header has {shown(name)} twice")
            seen.add(name)

    json.loads(data.decode(), object_pairs_hook=unique)


def _entry(name: str, raw: msgspec.Raw, label: str) -> TensorEntry:
    """Decode and check the entry of one tensor; raises RequestError (InvalidAdapter)."""
    if len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name) or ".." in name:
        raise _invalid(f"{label}: {shown(name)} is not a tensor's name")
    try:
        entry = _entry_decoder.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise _wrong_entry(name, raw, label) from None
    dtype, shape, (begin, end) = entry.dtype, entry.shape, entry.data_offsets
    item = ITEM_BYTES.get(dtype)
    if item is None:
        raise _invalid(f"{label}: {name}: {ascii(dtype)[:120]} is not a dtype")
    if end - begin != math.prod(shape) * item:
        expected = f"{dtype} {list(shape)} takes {math.prod(shape) * item} bytes"
        raise _invalid(f"{label}: {name}: {expected}, its data_offsets have {end - begin}")
    return TensorEntry(dtype=dtype, shape=shape, begin=begin, end=end)


def _wrong_entry(name: str, raw: msgspec.Raw, label: str) -> RequestError:
    """Return the InvalidAdapter error for an entry that `_Entry` refused.

    Plain JSON shows if the dtype, shape, data_offsets or field names are at fault.
    """
    try:
        value = json.loads(bytes(raw))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        return _invalid(f"{label}: {name}: expected dtype, shape and data_offsets in the header, found {ascii(value)[:120]}")
    if not isinstance(value["dtype"], str):
        return _invalid(f"{label}: {name}: {ascii(value['dtype'])[:120]} is not a dtype")
    if not _are_sizes(value["shape"]) or len(value["shape"]) > MAX_DIMENSIONS:
        return _invalid(f"{label}: {name}: {ascii(value['shape'])[:120]} is not a shape")
    return _invalid(f"{label}: {name}: {ascii(value['data_offsets'])[:120]} are not data_offsets")


def _are_sizes(values: Any) -> bool:
    if not isinstance(values, list) or not {int}.issuperset(map(type, values)):
        return False
    return not values or (min(values) >= 0 and max(values) <= MAX_FILE_BYTES)


def _check_ranges(tensors: Mapping[str, TensorEntry], data_bytes: int, label: str) -> None:
    """Raise RequestError (InvalidAdapter) for a gap or an overlap of tensors, or if they do not fill `data_bytes`, the rest of the file."""
    at = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            what = "overlaps the tensor before it" if entry.begin < at else "leaves a hole before it"
            raise _invalid(f"{label}: {name}: its data_offsets [{entry.begin}, {entry.end}] are wrong: it {what}, which ends at {at}")
        if entry.end > data_bytes:
            raise _invalid(f"{label}: {name}: ends at byte {entry.end} of {data_bytes}: the file is truncated, or its header is wrong")
        at = entry.end
    if at != data_bytes:
        raise _invalid(f"{label}: its tensors take {at} bytes, but {data_bytes} follow the header")


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ADAPTER, message)
