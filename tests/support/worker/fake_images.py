# SPDX-License-Identifier: Apache-2.0
"""What a `FakeRankGroup` makes of a request: bytes that follow from the request alone."""

import hashlib
from collections.abc import Sequence

from diffusion_worker.messages import RequestSpec

DEFAULT_STEPS = 4
DEFAULT_SIZE = 64


def fake_pixels(spec: RequestSpec, adapter_path: str | None = None, frames: Sequence[bytes | memoryview] = ()) -> bytes:
    """The image of a request and the frames of its images: the same for the same request, another for another."""
    lora = (adapter_path, [use.scale for use in spec.loras]) if spec.loras else None
    fields = (spec.prompt, spec.negative_prompt, spec.seed, spec.height, spec.width, spec.steps, spec.guidance_scale, lora)
    edit = (spec.task, spec.strength, spec.images, spec.mask, [hashlib.sha256(frame).digest() for frame in frames]) if frames else ()
    pattern = hashlib.sha256(repr(fields + edit).encode()).digest()
    size = (spec.height or DEFAULT_SIZE) * (spec.width or DEFAULT_SIZE) * 3
    return (pattern * (size // len(pattern) + 1))[:size]


def fake_preview(spec: RequestSpec, number: int) -> bytes:
    """A preview of a request: every one of its previews and its image look different."""
    size = len(fake_pixels(spec))
    pattern = hashlib.sha256(f"{number} {spec.seed}".encode()).digest()
    return (pattern * (size // len(pattern) + 1))[:size]


def fake_preview_steps(spec: RequestSpec) -> list[int]:
    """The steps after which the previews of a request are made: evenly spaced, none at the start or at the end."""
    steps = spec.steps or DEFAULT_STEPS
    wanted = (number * steps // (spec.previews + 1) for number in range(1, spec.previews + 1))
    return sorted({step for step in wanted if 0 < step < steps})


def fake_shape(spec: RequestSpec) -> tuple[int, int, int]:
    """Height, width and channels of the image of a request."""
    return spec.height or DEFAULT_SIZE, spec.width or DEFAULT_SIZE, 3
