# SPDX-License-Identifier: Apache-2.0
"""Images with a natural spectrum, and how fast and small PNGs of them are made, against Pillow's own."""

import io

import numpy as np
from PIL import Image

from benchmarks.pairs import Pairs, Plan, take_pairs, timed
from diffusion_worker.server.encoding.images import OutputFormat, encode


def natural_image(exponent: float, seed: int, size: int) -> bytes:
    """Make a random image with the statistics of a photograph: amplitudes fall with frequency as 1/f^exponent, and channels correlate.

    A larger exponent is smoother. Returns `size` rows of `size` RGB pixels, as bytes.
    """
    random = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None, :])
    frequency[0, 0] = 1.0
    channels = []
    for _ in range(3):
        waves = random.normal(size=frequency.shape) + 1j * random.normal(size=frequency.shape)
        plane = np.fft.irfft2(waves / frequency**exponent, (size, size))
        channels.append((plane - plane.mean()) / plane.std())
    mixed = [0.8 * channels[0] + 0.2 * plane for plane in channels]
    pixels: bytes = np.clip(np.stack(mixed, axis=-1) * 50 + 128, 0, 255).astype(np.uint8).tobytes()
    return pixels


def encoding_pairs(name: str, pixels: bytes, size: int, plan: Plan) -> tuple[Pairs, float]:
    """Measure our PNG encoder between two runs of Pillow's, in CPU time of the thread.

    Returns the pairs, and the size of our PNG divided by that of Pillow's.

    Raises:
        RuntimeError: our PNG has other pixels than the image, or the machine is too busy.
    """
    image = Image.frombytes("RGB", (size, size), pixels)

    def by_pillow() -> bytes:
        out = io.BytesIO()
        image.save(out, format="PNG")
        return out.getvalue()

    def by_us() -> bytes:
        return encode(pixels, size, size, output_format=OutputFormat.PNG)

    ours, theirs = by_us(), by_pillow()
    if Image.open(io.BytesIO(ours)).tobytes() != pixels:
        raise RuntimeError(f"{name}: the PNG has other pixels than the image")
    pairs = take_pairs(f"Pillow on the {name} image", lambda: timed(by_pillow), lambda: timed(by_us), by="thread_s", plan=plan)
    return pairs, len(ours) / len(theirs)
