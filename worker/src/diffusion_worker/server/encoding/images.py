# SPDX-License-Identifier: Apache-2.0
"""Pixels to files: PNG, JPEG and WebP with the image's provenance in them. Slow for large images: call it in a thread.

PNG's rows are filtered by Pillow and compressed by ISA-L, which takes a twentieth of the time of Pillow's own compression. Numpy
could filter as well, but would take more memory of the server process than everything else in it.
"""

import enum
import io
import json
import math
import struct
from collections.abc import Iterator, Mapping

import msgspec
from isal import isal_zlib

# Importing a format's module registers it with Pillow; otherwise Pillow imports all its forty.
from PIL import Image, ImageChops, JpegImagePlugin, WebPImagePlugin  # noqa: F401

from diffusion_worker.engine.state.request_events import FinishedImage, Provenance
from diffusion_worker.errors import ErrorCode, RequestError

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
UP_FILTER = b"\x02"
ISAL_LEVEL = 1
# Bytes that are filtered at a time, with the GIL; it is released for the compression between.
BAND_BYTES = 131_072

# Keyword of a PNG's text with the metadata as JSON; JPEG and WebP have it as their EXIF description.
METADATA_KEYWORD = "provenance"
EXIF_DESCRIPTION = 0x010E
EXIF_SOFTWARE = 0x0131

DEFAULT_QUALITY = 90


class OutputFormat(enum.StrEnum):
    """The file formats that a client can request."""

    PNG = "png"
    JPEG = "jpeg"
    WEBP = "webp"


# Limits of libwebp and libjpeg; a PNG can be as large as the limits of requests allow.
MOST_PIXELS_A_SIDE = {OutputFormat.WEBP: 16_383, OutputFormat.JPEG: 65_500}


def encode(
    pixels: bytes | memoryview,
    height: int,
    width: int,
    *,
    output_format: OutputFormat,
    compression: int | None = None,
    metadata: Mapping[str, object] | None = None,
) -> bytes:
    """Encode RGB pixels, given row by row, in the output format, and return the file's bytes.

    `compression` sets the quality of JPEG and WebP from 0 to 100, by default 90. PNG is lossless, ignores this, and always uses its fastest
    compression. `metadata` is embedded in the file as JSON.

    Raises:
        RequestError: InvalidRequest, a side is longer than the format allows.
    """
    check_sides(output_format, height, width)
    if output_format is OutputFormat.PNG:
        return _png(memoryview(pixels).cast("B"), height, width, metadata)
    image = _image("RGB", (width, height), pixels)
    out = io.BytesIO()
    image.save(out, output_format.upper(), quality=DEFAULT_QUALITY if compression is None else compression, exif=_exif(metadata or {}))
    return out.getvalue()


def check_sides(output_format: OutputFormat, height: int | None, width: int | None) -> None:
    """Check that no side is longer than the format allows; an unknown side (None) is not checked.

    Raises:
        RequestError: InvalidRequest.
    """
    most = MOST_PIXELS_A_SIDE.get(output_format, math.inf)
    if max(height or 0, width or 0) > most:
        message = f"output_format: expected at most {most} pixels a side for {output_format}, found {width}x{height}"
        raise RequestError(ErrorCode.INVALID_REQUEST, message, details={"field": "output_format"})


def metadata_of(provenance: Provenance, image: FinishedImage) -> dict[str, object]:
    """Return an image's provenance, seed and size as plain JSON data, the same in the answer and in the file, without the prompt."""
    made_by: dict[str, object] = msgspec.to_builtins(provenance)
    return made_by | {"seed": image.seed, "width": image.width, "height": image.height}


def _png(pixels: memoryview, height: int, width: int, metadata: Mapping[str, object] | None) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [PNG_SIGNATURE, *_chunk(b"IHDR", header)]
    if metadata is not None:
        # Keyword, uncompressed, no language, no translated keyword, UTF-8.
        chunks += _chunk(b"iTXt", METADATA_KEYWORD.encode("latin-1") + b"\0\0\0\0\0" + msgspec.json.encode(metadata))
    compressor = isal_zlib.compressobj(ISAL_LEVEL)
    for band in _filtered_bands(pixels, height, width * 3):
        chunks += _chunk(b"IDAT", compressor.compress(band))
    chunks += _chunk(b"IDAT", compressor.flush())
    return b"".join([*chunks, *_chunk(b"IEND", b"")])


def _filtered_bands(pixels: memoryview, height: int, row_bytes: int) -> Iterator[bytes]:
    """Yield PNG's rows in bands, filtered: the first row as it is, and each other row less the row above it."""
    yield UP_FILTER + pixels[:row_bytes]
    band = max(1, BAND_BYTES // row_bytes)
    for first in range(1, height, band):
        last = min(first + band, height)
        size = (row_bytes, last - first)
        above = _image("L", size, pixels[(first - 1) * row_bytes : (last - 1) * row_bytes])
        below = _image("L", size, pixels[first * row_bytes : last * row_bytes])
        rows = memoryview(ImageChops.subtract_modulo(below, above).tobytes())
        yield UP_FILTER + UP_FILTER.join(rows[start : start + row_bytes] for start in range(0, len(rows), row_bytes))


def _image(mode: str, size: tuple[int, int], pixels: bytes | memoryview) -> Image.Image:
    # Pillow takes any buffer, unlike its type hints.
    return Image.frombuffer(mode, size, pixels, "raw", mode, 0, 1)  # type: ignore[arg-type]


def _chunk(kind: bytes, content: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    return struct.pack(">I", len(content)), kind, content, struct.pack(">I", isal_zlib.crc32(content, isal_zlib.crc32(kind)))


def _exif(metadata: Mapping[str, object]) -> Image.Exif:
    exif = Image.Exif()
    if metadata:
        # EXIF's text is ASCII, in which JSON can be written.
        exif[EXIF_DESCRIPTION] = json.dumps(metadata)
        exif[EXIF_SOFTWARE] = f"diffusion-worker {metadata.get('engine', '')}".strip()
    return exif
