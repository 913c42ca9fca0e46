# SPDX-License-Identifier: Apache-2.0
"""A file to decode and its outcome, as the server and its decoding process send them to each other."""

import msgspec


class DecodeJob(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a client sent in the form field `field`.

    The image is scaled down to `max_pixels`. `as_mask`: make a mask by luminance where the file has no transparency. The process of the
    file may take `cpu_s` of CPU and `memory_bytes`.
    """

    field: str
    max_pixels: int
    as_mask: bool = False
    cpu_s: int = 5
    memory_bytes: int = 1 << 30


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """The size of the file's image, and of what follows: an image of 3 bytes a pixel and, with `masked`, a mask of 1."""

    file_height: int
    file_width: int
    height: int
    width: int
    masked: bool


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The file cannot be used: InvalidRequest with this message."""

    message: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The process cannot decode anything."""

    why: str


Outcome = Decoded | Refused | Failed
