# SPDX-License-Identifier: Apache-2.0
"""Images that a client sent, from the bytes of a file to pixels. Slow, and the bytes are anybody's: called in threads.

PNG, JPEG and WebP are told by their first bytes, whatever a client calls them. How many pixels an image has is known from its
header, before anything is decoded: Pillow's own check comes later, and is a setting of the whole process.
"""

import contextlib
import ctypes
import io
import math
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from PIL import ImageOps
from PIL.Image import Image, Resampling, new
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from diffusion_worker.engine.requests.admission import InputImage
from diffusion_worker.errors import refused

# As OpenAI says it. Forty million pixels are an image of 8K and more; decoded with transparency they are 160 MB.
MAX_FILE_BYTES = 50_000_000
MAX_FILE_PIXELS = 40_000_000
# Images over this are decoded one after the other: with copies the largest take half a gigabyte for a moment.
LARGE_PIXELS = 10_000_000
_large = threading.Lock()

# In EXIF: how a camera was held, and the ways that swap width and height.
ORIENTATION = 0x0112
LYING = (5, 6, 7, 8)
# What Pillow raises for files that are broken in one way or another.
BROKEN = (OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, OverflowError, ZeroDivisionError, MemoryError, struct.error)
# Sixteen bits a pixel of grey, which Pillow cuts off at 255 where it makes colours of them.
SIXTEEN_BITS = ("I", "I;16", "I;16B", "I;16L", "I;16N")


class DecodedImage(NamedTuple):
    """`image` has at most the pixels that were asked for; `height` and `width` are those of the file.

    `mask` is 255 where the file is fully transparent; None where it has no transparency at all.
    """

    image: InputImage
    mask: InputImage | None
    height: int
    width: int


class UploadFormat(NamedTuple):
    """A format of files: how they begin, the size in pixels that they claim, and what reads them."""

    name: str
    size: Callable[[bytes], tuple[int, int] | None]
    opened: Callable[[io.BytesIO], Image]


def decode(field: str, content: bytes, *, max_pixels: int) -> DecodedImage:
    """An image as it is seen: turned as its EXIF says, transparent parts on white, scaled down to `max_pixels`.

    Raises:
        RequestError: InvalidRequest that names the field, what was expected and what was found.
    """
    format_ = _format_of(content)
    if format_ is None:
        raise refused(field, "an image in PNG, JPEG or WebP", f"{len(content)} bytes of something else" if content else "no bytes")
    try:
        claimed = format_.size(content)
        if claimed is not None:
            _check_pixels(field, *claimed)
        image: Any = format_.opened(io.BytesIO(content))
        width, height = image.size
        _check_pixels(field, width, height)
        target = _fitting(width, height, max_pixels)
        with _one_of_the_large() if width * height > LARGE_PIXELS else contextlib.nullcontext():
            image.draft("RGB", target)  # a JPEG can be decoded at half its size, or less
            if image.getexif().get(ORIENTATION) in LYING:
                width, height, target = height, width, target[::-1]
            found = decoded(ImageOps.exif_transpose(image), target)._replace(height=height, width=width)
            image.close()
            del image
            return found
    except BROKEN as error:
        raise refused(field, f"a whole {format_.name} file", f"one that cannot be decoded ({type(error).__name__})") from None


@contextlib.contextmanager
def _one_of_the_large() -> Iterator[None]:
    """Nobody else's large image meanwhile; afterwards glibc gives back what it would keep for the next one."""
    with _large:
        try:
            yield
        finally:
            if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
                trim(0)


def decoded(image: Image, target: tuple[int, int]) -> DecodedImage:
    """An open image in the size `target` (width, height), transparent parts on white."""
    height, width = image.height, image.width
    if image.mode in SIXTEEN_BITS:
        image = image.convert("I").point(lambda value: value * (1 / 257)).convert("L")
    mask = None
    if image.has_transparency_data:
        image = _in_mode(image, "RGBA")
        alpha = image.getchannel("A")
        mask = alpha.point(lambda value: 0 if value else 255)
        on_white = new("RGB", image.size, "white")
        on_white.paste(image, mask=alpha)
        image = on_white
    image = _in_mode(image, "RGB")
    if image.size != target:
        image = image.resize(target, Resampling.LANCZOS, reducing_gap=3.0)
    if mask is not None and mask.size != target:
        mask = mask.resize(target, Resampling.NEAREST)
    return DecodedImage(_pixels(image, 3), None if mask is None else _pixels(mask, 1), height, width)


def _in_mode(image: Image, mode: str) -> Image:
    """Pillow copies an image that is in its mode already."""
    return image if image.mode == mode else image.convert(mode)


def _pixels(image: Image, channels: int) -> InputImage:
    return InputImage(image.tobytes(), image.height, image.width, channels)


def _check_pixels(field: str, width: int, height: int) -> None:
    if width * height > MAX_FILE_PIXELS:
        raise refused(field, f"an image of at most {MAX_FILE_PIXELS} pixels", f"one of {width}x{height}")


def _fitting(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """The size of an image that is scaled down until it has no more than so many pixels."""
    scale = min(1.0, math.sqrt(max_pixels / (width * height))) if width and height else 1.0
    return max(1, int(width * scale)), max(1, int(height * scale))


def _format_of(content: bytes) -> UploadFormat | None:
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return PNG
    if content.startswith(b"\xff\xd8\xff"):
        return JPEG
    return WEBP if content[:4] == b"RIFF" and content[8:12] == b"WEBP" else None


def _png_size(content: bytes) -> tuple[int, int] | None:
    return struct.unpack(">II", content[16:24]) if content[12:16] == b"IHDR" else None


def _webp_size(content: bytes) -> tuple[int, int] | None:
    """Its reader takes memory for all pixels before it says how many there are."""
    kind = content[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(content[24:27], "little"), 1 + int.from_bytes(content[27:30], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(content[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        return int.from_bytes(content[26:28], "little") & 0x3FFF, int.from_bytes(content[28:30], "little") & 0x3FFF
    raise ValueError("a WebP file without an image")


PNG = UploadFormat("PNG", _png_size, PngImageFile)
# Its reader stops at the header.
JPEG = UploadFormat("JPEG", lambda content: None, JpegImageFile)
WEBP = UploadFormat("WebP", _webp_size, WebPImageFile)
