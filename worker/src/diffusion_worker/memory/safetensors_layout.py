# SPDX-License-Identifier: Apache-2.0
"""The header of a safetensors file, read by the library of that name; without torch.

The library gets a copy of the header in a file of memory, which is as long as the original and holds no tensor. So it compares the
header with the size of the file, while nobody can change what it reads.
"""

import json
import os
from typing import Any, NamedTuple

import msgspec
import safetensors

LENGTH_BYTES = 8
METADATA = "__metadata__"
_PREFIX = "Error while deserializing header: "


# A file has some thousand of these, so they are left out of garbage collections.
class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """The dtype, in the format's own words, and the shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]


class Layout(NamedTuple):
    """The content of a header; `tensors` follow one another in the file in this order, and fill it after the header."""

    metadata: dict[str, str]
    tensors: dict[str, TensorEntry]


def read_layout(beginning: bytes, size_bytes: int) -> Layout:
    """Read the header of a file of `size_bytes` from its `beginning`, which is the length of the header and the header.

    The library keeps the last of two tensors of one name, and ignores fields that it does not know.

    Raises:
        ValueError: the library refuses the header. The text names the tensor that is wrong by itself. If none is, and the last one
            does not end with the file, the text says where it ends. Otherwise it is the library's reason.
    """
    try:
        return _read(beginning, size_bytes)
    except safetensors.SafetensorError as error:
        raise ValueError(_refused_alone(beginning[LENGTH_BYTES:], size_bytes) or _reason(error)) from None


def _read(beginning: bytes, size_bytes: int) -> Layout:
    with os.fdopen(os.memfd_create("header", os.MFD_CLOEXEC), "wb") as copy:
        copy.write(beginning)
        copy.truncate(size_bytes)
        # A framework is asked for and not used. With `pread` the whole file is mapped only while the header is parsed.
        with safetensors.safe_open(f"/proc/self/fd/{copy.fileno()}", framework="numpy", backend="pread") as opened:
            slices = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
            tensors = {name: TensorEntry(each.get_dtype(), tuple(each.get_shape())) for name, each in slices}
            return Layout(opened.metadata() or {}, tensors)


def _refused_alone(header: bytes, size_bytes: int) -> str | None:
    """Return a text with the first entry that the library refuses also by itself, a tensor or the metadata, and the reason.

    If it accepts each by itself, the text says where the last tensor ends. Return None if that is the end of the file, or if the header is
    not JSON.
    """
    try:
        document = json.loads(header)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    for name, entry in document.items():
        text, size = _alone(name, entry)
        try:
            _read(len(text).to_bytes(LENGTH_BYTES, "little") + text, LENGTH_BYTES + len(text) + size)
        except safetensors.SafetensorError as error:
            return f"{ascii(name)[1:-1][:160]}: {_reason(error)}"
    begin = LENGTH_BYTES + len(header)
    ends = {name: begin + entry["data_offsets"][1] for name, entry in document.items() if name != METADATA}
    last = max(ends, key=ends.__getitem__, default=None)
    if last is None or ends[last] == size_bytes:
        return None
    return f"its last tensor, {ascii(last)[1:-1][:160]}, ends at byte {ends[last]}"


def _alone(name: str, entry: Any) -> tuple[bytes, int]:
    """Return the header of a file with this entry only, and the bytes of its tensor."""
    size = 0
    match entry:
        case {"data_offsets": [int(begin), int(end)]} if 0 <= begin <= end < begin + (1 << 48):
            size = end - begin
            entry = entry | {"data_offsets": [0, size]}
    return json.dumps({name: entry}).encode(), size


def _reason(error: safetensors.SafetensorError) -> str:
    """Return the library's reason; it may quote the file, so it is shortened, and unusual characters are escaped."""
    return ascii(str(error).removeprefix(_PREFIX))[1:-1][:240]
