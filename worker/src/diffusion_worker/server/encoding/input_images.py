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
from diffusion_worker.errors import RequestError, refused

# OpenAI's limit on files. An image of 8K has fewer than forty million pixels; decoded with transparency these take 160 MB.
MAX_FILE_BYTES = 50_000_000
MAX_FILE_PIXELS = 40_000_000
# Larger images are decoded one after the other, as with copies the largest take half a gigabyte for a moment.
LARGE_PIXELS = 10_000_000
# Most scans of a JPEG, each of which goes over the whole image. Encoders write ten.
MAX_SCANS = 64
# Markers of JPEG: a scan, the end, those without a length (a temporary one, restarts, the start), and those of a frame, with its size.
SCAN, END, BARE = 0xDA, 0xD9, (0x01, *range(0xD0, 0xD9))
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Most segments of a JPEG before its frame that are passed over to find its size. A colour profile has 255 at most.
MAX_SEGMENTS = 1000

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


def claimed_size(field: str, content: bytes) -> tuple[int, int] | None:
    """Return in bounded time width and height that a file's header claims, before a turn by EXIF; None if only a decoder can find them.

    Raises:
        RequestError: InvalidRequest, the file is of no format that is decoded, its header is broken, or claims too many pixels.
    """
    return _claimed(field, content, _format_of(field, content))


def _claimed(field: str, content: bytes, format_: UploadFormat) -> tuple[int, int] | None:
    try:
        claimed = format_.size(content)
    except BROKEN as error:
        raise _not_whole(field, format_, error) from None
    if claimed is None or 0 in claimed:
        return None
    _check_pixels(field, *claimed)
    return claimed


def decode(field: str, content: bytes, *, max_pixels: int, large: AbstractContextManager[None] = ALONE) -> DecodedImage:
    """Decode a client's file to RGB: upright by its EXIF, on white where transparent, and shrunk to at most `max_pixels`.

    The result's `height` and `width` are the file's own. `large` is a lock, held while a file of more than `LARGE_PIXELS` is decoded.

    Raises:
        RequestError: InvalidRequest that names the field, what was expected and what was found.
    """
    format_ = _format_of(field, content)
    _claimed(field, content, format_)
    try:
        if format_ is JPEG and (scans := scans_of(content)) > MAX_SCANS:
            raise refused(field, f"a JPEG of at most {MAX_SCANS} scans", f"{scans} scans")
        image: Any = format_.opened(io.BytesIO(content))
        width, height = image.size
        _check_pixels(field, width, height)
        target = fitting(width, height, max_pixels)
        with large if width * height > LARGE_PIXELS else contextlib.nullcontext():
            image.draft("RGB", target)  # a JPEG can be decoded at half its size, or less
            if image.getexif().get(ORIENTATION) in LYING:
                width, height, target = height, width, target[::-1]
            return decoded(ImageOps.exif_transpose(image), target)._replace(height=height, width=width)
    except BROKEN as error:
        raise _not_whole(field, format_, error) from None


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


def _not_whole(field: str, format_: UploadFormat, error: Exception) -> RequestError:
    return refused(field, f"a whole {format_.name} file", f"a file that cannot be decoded ({type(error).__name__})")


def fitting(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """Return width and height scaled down alike to at most `max_pixels`, each at least 1; unchanged if they fit."""
    scale = min(1.0, math.sqrt(max_pixels / (width * height))) if width and height else 1.0
    return max(1, int(width * scale)), max(1, int(height * scale))


def _format_of(field: str, content: bytes) -> UploadFormat:
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return PNG
    if content.startswith(b"\xff\xd8\xff"):
        return JPEG
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return WEBP
    size = len(content)
    raise refused(field, "an image in PNG, JPEG or WebP", f"{size} bytes of another format" if size else "no bytes")


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


def _jpeg_size(content: bytes) -> tuple[int, int] | None:
    """Return width and height from a JPEG's frame; None if there is none among its first segments."""
    at = 2
    for _ in range(MAX_SEGMENTS):
        first, marker, length = struct.unpack_from(">BBH", content, at)
        if first != 0xFF:
            return None
        if marker in FRAMES:
            height, width = struct.unpack_from(">5xHH", content, at)
            return width, height
        if marker in (SCAN, END):
            return None
        # A fill byte, a marker alone, or a segment.
        at += 1 if marker == 0xFF else 2 if marker in BARE else 2 + length
    return None


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
JPEG = UploadFormat("JPEG", _jpeg_size, JpegImageFile)
WEBP = UploadFormat("WebP", _webp_size, WebPImageFile)
