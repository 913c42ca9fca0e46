# SPDX-License-Identifier: Apache-2.0
"""Files that clients may send for an image: broken, of the wrong type, larger than they claim, slow to decode, and ordinary ones."""

import io
import struct
import zlib
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from PIL import Image, PngImagePlugin

from diffusion_worker.server.encoding.input_images import scans_of

FORMATS = ("PNG", "JPEG", "WEBP")


class HostileImage(NamedTuple):
    """A file, and whether it must load; `loads` is None where Pillow decides."""

    kind: str
    content: bytes
    loads: bool | None


def image_file(format_: str, rng: Random, *, mode: str = "RGB", size: tuple[int, int] = (32, 32), **saved: Any) -> bytes:
    """Return an image file with two random colours, one in each half; `saved` are options of Pillow's `save`."""
    out = io.BytesIO()
    image = Image.new(mode, size, tuple(rng.randrange(256) for _ in mode))
    image.paste(tuple(rng.randrange(256) for _ in mode), (0, 0, size[0] // 2, size[1]))
    image.save(out, format_, **saved)
    return out.getvalue()


def many_scans(content: bytes, scans: int) -> bytes:
    """Return a progressive JPEG with its last scan repeated until it has `scans`; with as many already it stays as it is."""
    last = content.rfind(b"\xff\xda")
    return content[:-2] + content[last:-2] * max(0, scans - scans_of(content)) + content[-2:]


def png_of(width: int, height: int, rows: bytes) -> bytes:
    """Return an RGB PNG file that claims a size, with `rows` as its compressed data, even if they do not fit."""
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b""))
    body = b"".join(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def draw(rng: Random) -> HostileImage:
    """Return a random file of any kind."""
    kind = rng.choices([*KINDS], [often for often, _ in KINDS.values()])[0]
    return KINDS[kind][1](rng)._replace(kind=kind)


def _ordinary(rng: Random) -> HostileImage:
    return HostileImage("", image_file(rng.choice(FORMATS), rng), True)


def _transparent(rng: Random) -> HostileImage:
    return HostileImage("", image_file(rng.choice(("PNG", "WEBP")), rng, mode="RGBA"), True)


def _animated(rng: Random) -> HostileImage:
    more = [Image.new("RGB", (32, 32), (rng.randrange(256), 0, 0)) for _ in range(rng.randint(1, 200))]
    return HostileImage("", image_file(rng.choice(("PNG", "WEBP")), rng, save_all=True, append_images=more, duration=20), True)


def _profile(rng: Random) -> HostileImage:
    """Return a file whose colour profile is invalid. Pillow reads at most a megabyte of a profile in a PNG."""
    size = rng.choice((3, 5_000, 2_000_000))
    return HostileImage("", image_file(rng.choice(FORMATS), rng, icc_profile=rng.randbytes(size)), True if size < 1_000_000 else None)


def _metadata(rng: Random) -> HostileImage:
    """Return a file with megabytes of text, some of which grow when they are read."""
    if rng.random() < 0.5:
        return HostileImage("", image_file("JPEG", rng, comment=rng.randbytes(60_000)), True)
    texts = PngImagePlugin.PngInfo()
    for number in range(rng.randint(1, 80)):
        texts.add_text(f"text{number}", "a" * rng.choice((10, 100_000, 1_000_000)), zip=True)
    return HostileImage("", image_file("PNG", rng, pnginfo=texts), None)


def _truncated(rng: Random) -> HostileImage:
    content = image_file(rng.choice(FORMATS), rng)
    return HostileImage("", content[: rng.randrange(len(content))], None)


def _mutated(rng: Random) -> HostileImage:
    content = bytearray(image_file(rng.choice(FORMATS), rng))
    for _ in range(rng.randint(1, 12)):
        content[rng.randrange(12, len(content))] = rng.randrange(256)
    return HostileImage("", bytes(content), None)


def _wrong_type(rng: Random) -> HostileImage:
    if rng.random() < 0.5:
        return HostileImage("", image_file(rng.choice(("GIF", "TIFF", "BMP", "PPM")), rng), False)
    return HostileImage("", rng.choice((b"", b"<svg/>", b"%PDF-1.7", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP", rng.randbytes(400))), False)


def _too_large(rng: Random) -> HostileImage:
    """Return a file of a few bytes that claims more pixels than are allowed."""
    return HostileImage("", png_of(rng.randint(6_400, 2**31 - 1), rng.randint(6_400, 2**31 - 1), zlib.compress(b"\0" * 100)), False)


def _bomb(rng: Random) -> HostileImage:
    """Return a file of some kilobytes with up to as many pixels as are allowed."""
    side = rng.choice((2_000, 4_000, 6_300))
    return HostileImage("", png_of(side, side, zlib.compress(bytes((3 * side + 1) * side))), True)


def _scans(rng: Random) -> HostileImage:
    """Return a JPEG with many scans, or with few slow ones."""
    side, scans = rng.choice(((64, 800), (3_000, 800), (64, 40), (3_000, 64)))
    content = many_scans(image_file("JPEG", rng, mode="L", size=(side, side), progressive=True), scans)
    return HostileImage("", content, False if scans > 64 else None)


KINDS: dict[str, tuple[int, Callable[[Random], HostileImage]]] = {
    "ordinary": (3, _ordinary),
    "transparent": (2, _transparent),
    "animated": (2, _animated),
    "profile": (2, _profile),
    "metadata": (3, _metadata),
    "truncated": (6, _truncated),
    "mutated": (8, _mutated),
    "wrong type": (4, _wrong_type),
    "too large": (2, _too_large),
    "bomb": (1, _bomb),
    "scans": (2, _scans),
}
