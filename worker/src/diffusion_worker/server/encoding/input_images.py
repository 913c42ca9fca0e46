# SPDX-License-Identifier: Apache-2.0
"""Images that a client sent, from the bytes of a file to pixels. Slow and untrusted, so it runs in a process of its own.

PNG, JPEG and WebP are recognised by their first bytes, regardless of the name a client gives. The number of pixels is read from the
header, before anything is decoded. Pillow's own check comes later, and is a setting of the whole process.
"""

import contextlib
import io
import math
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from PIL import ImageOps
from PIL.Image import Image, Resampling, frombytes, new
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from diffusion_worker.engine.requests.admission import InputImage
from diffusion_worker.errors import refused

# OpenAI's limit on files. An image of 8K has fewer than forty million pixels; decoded with transparency these take 160 MB.
MAX_FILE_BYTES = 50_000_000
MAX_FILE_PIXELS = 40_000_000
# Larger images are decoded one after the other, as with copies the largest take half a gigabyte for a moment.
LARGE_PIXELS = 10_000_000
# Most scans of a JPEG, each of which goes over the whole image. Encoders write ten.
MAX_SCANS = 64
# Markers of JPEG: a scan, the end, and those without a length (a temporary one, restarts, the start).
SCAN, END, BARE = 0xDA, 0xD9, (0x01, *range(0xD0, 0xD9))

# EXIF's tag for the orientation of the camera, and its values that swap width and height.
ORIENTATION = 0x0112
LYING = (5, 6, 7, 8)
# Errors that Pillow raises for broken files.
BROKEN = (OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, OverflowError, ZeroDivisionError, struct.error)
# Modes with sixteen bits of grey a pixel, which Pillow cuts off at 255 in a conversion to colours.
SIXTEEN_BITS = ("I", "I;16", "I;16B", "I;16L", "I;16N")

# The darkest grey of a mask that counts as white.
LIGHT = 128


class DecodedImage(NamedTuple):
    """A decoded image of at most the allowed pixels. `height` and `width` are those of the file.

    `mask` is 255 where the file is fully transparent and 0 elsewhere; None if every pixel is opaque.
    """

    image: InputImage
    mask: InputImage | None
    height: int
    width: int


class UploadFormat(NamedTuple):
    """A file format: its name, the reader of the claimed size in pixels, and the decoder."""

    name: str
    size: Callable[[bytes], tuple[int, int] | None]
    opened: Callable[[io.BytesIO], Image]


# The default lock, for a caller that decodes one image at a time.
ALONE = contextlib.nullcontext()


def decode(field: str, content: bytes, *, max_pixels: int, large: AbstractContextManager[None] = ALONE) -> DecodedImage:
    """Decode a client's file to RGB: upright by its EXIF, on white where transparent, and shrunk to at most `max_pixels`.

    The result's `height` and `width` are the file's own. `large` is a lock, held while a file of more than `LARGE_PIXELS` is decoded.

    Raises:
        RequestError: InvalidRequest that names the field, what was expected and what was found.
    """
    format_ = _format_of(content)
    if format_ is None:
        size = len(content)
        raise refused(field, "an image in PNG, JPEG or WebP", f"{size} bytes of another format" if size else "no bytes")
    try:
        claimed = format_.size(content)
        if claimed is not None:
            _check_pixels(field, *claimed)
        if format_ is JPEG and (scans := scans_of(content)) > MAX_SCANS:
            raise refused(field, f"a JPEG of at most {MAX_SCANS} scans", f"{scans} scans")
        image: Any = format_.opened(io.BytesIO(content))
        width, height = image.size
        _check_pixels(field, width, height)
        target = _fitting(width, height, max_pixels)
        with large if width * height > LARGE_PIXELS else contextlib.nullcontext():
            image.draft("RGB", target)  # a JPEG can be decoded at half its size, or less
            if image.getexif().get(ORIENTATION) in LYING:
                width, height, target = height, width, target[::-1]
            return decoded(ImageOps.exif_transpose(image), target)._replace(height=height, width=width)
    except BROKEN as error:
        raise refused(field, f"a whole {format_.name} file", f"a file that cannot be decoded ({type(error).__name__})") from None


def decoded(image: Image, target: tuple[int, int]) -> DecodedImage:
    """Convert an opened file to RGB pixels and, unless every pixel is opaque, a mask of the fully transparent ones.

    Both are scaled to `target` (width, height). Transparency is blended with white, and sixteen-bit grey reduced to eight. The result's
    `height` and `width` are those before scaling.
    """
    height, width = image.height, image.width
    if image.mode in SIXTEEN_BITS:
        image = image.convert("I").point(lambda value: value * (1 / 257)).convert("L")
    mask = None
    if image.has_transparency_data:
        image = _in_mode(image, "RGBA")
        alpha = image.getchannel("A")
        if alpha.getextrema() != (255, 255):
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


def mask_by_luminance(image: InputImage) -> InputImage:
    """Return a mask of an RGB image: 255 where its grey is `LIGHT` or lighter, else 0."""
    grey = frombytes("RGB", (image.width, image.height), image.pixels).convert("L")
    return _pixels(grey.point(lambda value: 255 if value >= LIGHT else 0), 1)


def _in_mode(image: Image, mode: str) -> Image:
    """Return an image in a mode, without the copy that Pillow makes of an image in that mode already."""
    return image if image.mode == mode else image.convert(mode)


def _pixels(image: Image, channels: int) -> InputImage:
    return InputImage(image.tobytes(), image.height, image.width, channels)


def _check_pixels(field: str, width: int, height: int) -> None:
    if width * height > MAX_FILE_PIXELS:
        raise refused(field, f"an image of at most {MAX_FILE_PIXELS} pixels", f"{width}x{height}")


def _fitting(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """Return width and height scaled down alike to at most `max_pixels`, each at least 1; unchanged if they fit."""
    scale = min(1.0, math.sqrt(max_pixels / (width * height))) if width and height else 1.0
    return max(1, int(width * scale)), max(1, int(height * scale))


def _format_of(content: bytes) -> UploadFormat | None:
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return PNG
    if content.startswith(b"\xff\xd8\xff"):
        return JPEG
    return WEBP if content[:4] == b"RIFF" and content[8:12] == b"WEBP" else None


def scans_of(content: bytes) -> int:
    """Count the scans of a JPEG. Segments are skipped by their length, so that metadata does not count."""
    scans, at = 0, 2
    while (at := content.find(b"\xff", at)) >= 0 and at + 1 < len(content):
        marker = content[at + 1]
        if marker == END:
            break
        if marker in (0, 0xFF, *BARE):  # a byte of a scan, a fill byte, or a marker alone
            at += 1 if marker == 0xFF else 2
            continue
        scans += marker == SCAN
        at += 2 + max(2, int.from_bytes(content[at + 2 : at + 4]))
    return scans


def _png_size(content: bytes) -> tuple[int, int] | None:
    return struct.unpack(">II", content[16:24]) if content[12:16] == b"IHDR" else None


def _webp_size(content: bytes) -> tuple[int, int] | None:
    """Return width and height from a WebP's header, as the reader allocates memory for all pixels before it reports their number.

    Raises:
        ValueError: the file has no image.
    """
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
# Without an own reader of sizes, as Pillow's stops at the header.
JPEG = UploadFormat("JPEG", lambda content: None, JpegImageFile)
WEBP = UploadFormat("WebP", _webp_size, WebPImageFile)
