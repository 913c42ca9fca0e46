# SPDX-License-Identifier: Apache-2.0
"""A file to decode and its outcome, as the server and its decoding process exchange them."""

import msgspec


class DecodeJob(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a client sent in the form field `field`.

    A larger image is scaled down to `max_pixels`. With `as_mask`, a file without transparency makes a mask by luminance. The file's
    process may use `cpu_s` of CPU time and `memory_bytes`.
    """

    field: str
    max_pixels: int
    as_mask: bool = False
    cpu_s: int = 5
    memory_bytes: int = 1 << 30

    @property
    def memory_mib(self) -> int:
        """The allowed memory in MiB, rounded down."""
        return self.memory_bytes >> 20


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """The sizes of the file's image and of the pixels that follow: 3 bytes a pixel and, with `masked`, a mask of 1 byte."""

    file_height: int
    file_width: int
    height: int
    width: int
    masked: bool


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A file that cannot be used: InvalidRequest with this message."""

    message: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A process that cannot decode any file, with the reason."""

    why: str


Outcome = Decoded | Refused | Failed
