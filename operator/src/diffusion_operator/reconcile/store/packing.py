# SPDX-License-Identifier: Apache-2.0
"""Compression of objects of one kind, which are nearly alike: each is stored as its difference from a reference of that kind."""

import zlib

_FAST = 1
_WINDOW_BITS, _MEMORY_LEVEL = 13, 6
"""A compressor takes 64 KB with these. The defaults of zlib take 256 KB, and are no faster and no smaller for objects of a few KB."""
_REFERENCE_BYTES = 1 << _WINDOW_BITS
"""zlib looks no further back."""
_LONGER = 1.25
"""An object that is longer than the reference by this factor becomes the reference, as the first one with a status does."""


class Packer:
    """A compressor for the objects of one kind."""

    def __init__(self) -> None:
        self._reference = b""

    def pack(self, content: bytes) -> tuple[bytes, bytes]:
        """Return the compressed bytes, and the reference that `unpack` needs. Many objects have the same reference."""
        if min(len(content), _REFERENCE_BYTES) > _LONGER * len(self._reference):
            self._reference = content[:_REFERENCE_BYTES]
        compressor = zlib.compressobj(_FAST, wbits=-_WINDOW_BITS, memLevel=_MEMORY_LEVEL, zdict=self._reference)
        return compressor.compress(content) + compressor.flush(), self._reference


def unpack(packed: bytes, reference: bytes) -> bytes:
    """Return the bytes that were given to `pack`."""
    return zlib.decompressobj(wbits=-_WINDOW_BITS, zdict=reference).decompress(packed)
