# SPDX-License-Identifier: Apache-2.0
"""The header of an adapter's safetensors file, judged before any tensor is read; without torch.

The file is eight bytes with the header's length, the header, then the tensors' bytes. The library `safetensors` reads the header
(`memory.safetensors_layout`), and refuses one whose tensors do not fill the rest of the file once. Here it is judged by what an adapter
needs: bounds of its size, plain names that occur once, and few dimensions. A field that the library would ignore is refused.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.lora.located import NAME_CHARACTER, PICKLE_SUFFIXES, shown
from diffusion_worker.lora.regular_file import open_regular
from diffusion_worker.memory.safetensors_layout import LENGTH_BYTES, METADATA, TensorEntry, read_layout

# Trainers keep statistics of their data sets in the metadata: some hundred KB. This bounds the memory and time of parsing.
MAX_HEADER_BYTES = 16 << 20
# Far over any adapter: rank 256 of a model of 12 billion parameters in float32 is 4 GB.
MAX_FILE_BYTES = 16 << 30
# Each tensor is a table and two lists in the header. Adapters have up to some thousand; objects for many more would take long to make.
MAX_TENSORS = 20_000
MAX_DIMENSIONS = 8
# The names of modules, joined by single dots.
TENSOR_NAME = re.compile(rf"(?!.*\.\.){NAME_CHARACTER}{{1,512}}")
_OTHER_FORMATS = (
    (b"PK\x03\x04", ErrorCode.UNSUPPORTED_FORMAT, "a zip or PyTorch pickle file; pickle can run code and is never read"),
    (b"\x80\x02", ErrorCode.UNSUPPORTED_FORMAT, "a pickle file; pickle can run code and is never read"),
    (b"\x80\x03", ErrorCode.UNSUPPORTED_FORMAT, "a pickle file; pickle can run code and is never read"),
    (b"\x80\x04", ErrorCode.UNSUPPORTED_FORMAT, "a pickle file; pickle can run code and is never read"),
    (b"\x80\x05", ErrorCode.UNSUPPORTED_FORMAT, "a pickle file; pickle can run code and is never read"),
    (b"GGUF", ErrorCode.UNSUPPORTED_FORMAT, "a GGUF file"),
    (b"\x89HDF", ErrorCode.UNSUPPORTED_FORMAT, "an HDF5 file"),
    (b"version https://git-lfs", ErrorCode.INVALID_ADAPTER, "a git-lfs pointer instead of the file itself"),
    (b"<", ErrorCode.INVALID_ADAPTER, "a page of HTML or XML"),
)


class AdapterHeader(msgspec.Struct, frozen=True):
    """The checked header of a file of `size_bytes`; its tensors begin at byte `data_start`, and follow one another in this order."""

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
        RequestError: UnsupportedFormat for a name that ends as a pickle's does (`.bin`, `.pt`). InvalidAdapter if the file cannot be
            opened, is not beneath the root, or is no regular file. A pipe or a device could block or have no end.
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
    """Check the bytes that `read_beginning` read from a file of `size_bytes`, and return the header in them.

    Raises:
        RequestError: InvalidAdapter with the first tensor that is wrong.
    """
    text = beginning[LENGTH_BYTES:]
    if text.count(b"{") > MAX_TENSORS or text.count(b"[") > 2 * MAX_TENSORS:
        raise _invalid(f"{label}: its header has more objects or lists than {MAX_TENSORS} tensors need, which is the limit")
    try:
        metadata, tensors = read_layout(beginning, size_bytes)
    except ValueError as error:
        _judge_text(text, label)
        raise _invalid(f"{label}: expected a complete safetensors file, found {size_bytes} bytes: {error}") from None
    if not _has_nothing_else(text, metadata, tensors) or not all(map(TENSOR_NAME.fullmatch, tensors)):
        _judge_text(text, label)
    for name, entry in tensors.items():
        # Only a tensor without values can have a size beyond that of its file.
        if len(entry.shape) > MAX_DIMENSIONS or (0 in entry.shape and max(entry.shape) > MAX_FILE_BYTES):
            expected = f"expected a shape of at most {MAX_DIMENSIONS} dimensions, each at most {MAX_FILE_BYTES}"
            raise _invalid(f"{label}: tensor {name}: {expected}, found {str(list(entry.shape))[:120]}")
    return AdapterHeader(metadata=metadata, tensors=tensors, data_start=len(beginning), size_bytes=size_bytes)


def _has_nothing_else(text: bytes, metadata: Mapping[str, str], tensors: Mapping[str, TensorEntry]) -> bool:
    """Return True if the header has no repeated name and no field that the library ignored; False if that is not sure.

    A tensor has two lists at least, so no tensor is there twice or is a list itself. Without escapes a string has exactly two quotes, and
    a tensor five strings: its name, three fields and a dtype. So a string that the library did not show would be one too many.
    """
    strings = 5 * len(tensors) + (1 + 2 * len(metadata) if metadata else 0)
    return b"\\" not in text and text.count(b"[") == 2 * len(tensors) and text.count(b'"') == 2 * strings


def _judge_text(data: bytes, label: str) -> None:
    """Refuse what the library would accept or not show: repeated names, unknown fields and unusual names.

    Raises:
        RequestError: InvalidAdapter.
    """
    try:
        # Objects become tuples of their pairs, so that none is lost, and lists stay lists.
        document = json.loads(data, object_pairs_hook=tuple)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"{label}: its header is not JSON: {str(error)[:120]}") from None
    if not isinstance(document, tuple):
        raise _invalid(f"{label}: expected a JSON object as its header, found {ascii(document)[:120]}")
    _refuse_repeated(document, label)
    for name, entry in document:
        if name == METADATA:
            _refuse_repeated(entry if isinstance(entry, tuple) else (), f"{label}: {METADATA}")
            continue
        if not TENSOR_NAME.fullmatch(name):
            raise _invalid(f"{label}: {shown(name)} cannot be a tensor's name: it is too long or has unusual characters")
        # The library requires its three fields once each, so that three fields are these.
        if not isinstance(entry, tuple) or len(entry) != 3:
            found = ascii(dict(entry) if isinstance(entry, tuple) else entry)[:120]
            raise _invalid(f"{label}: tensor {name}: expected dtype, shape and data_offsets in the header, found {found}")


def _refuse_repeated(pairs: tuple[tuple[str, Any], ...], label: str) -> None:
    """Raise RequestError (InvalidAdapter) for a name that an object has twice; the library would keep the last one."""
    if len({name for name, _ in pairs}) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise _invalid(f"{label}: its header has the name {shown(twice)} twice")


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ADAPTER, message)
