# SPDX-License-Identifier: Apache-2.0
"""Conversion of a pipeline's output to pixels, beside the next step: the consuming thread converts, and a GPU copies.

A pipeline's body ends with a `RawImage`. `keep_on_device` lets a view's image processor leave the image where it was
decoded, instead of waiting for a copy of it.
"""

import copy
import functools
from typing import Any

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.video_processor import VideoProcessor

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.runner.families import pipeline_record

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class RawImage:
    """An image or video as the pipeline returned it."""

    def __init__(self, output: Any) -> None:
        self._output = output
        self._copy: _Copy | None = None

    def begin_copy(self) -> None:
        """Start a GPU's conversion of the image to bytes and their copy, beside its next work; do nothing on other devices."""
        # An empty result is left for `pixels` to report, because an error raised here ends the rank.
        first = next(iter(self._output), None)
        if isinstance(first, torch.Tensor) and first.is_cuda:
            self._copy, self._output = _Copy(first), None

    def pixels(self) -> Pixels:
        """Convert the first image to uint8 [height, width, 3], a video to [frames, height, width, 3]; grey gets three channels.

        Any thread may ask. If a GPU's copy was begun, the thread sleeps until it is complete.

        Raises:
            RequestError: RequestFailed, the model returned NaN or infinity.
        """
        return to_pixels(self._output) if self._copy is None else self._copy.pixels()


def pixels_of(returned: Any) -> Pixels:
    """Return the pixels of a body's result; a result that is no `RawImage` is pixels already."""
    pixels: Pixels = returned.pixels() if isinstance(returned, RawImage) else returned
    return pixels


class _Copy:
    """Bytes on their way from a GPU, on a stream of their own and into pinned memory."""

    def __init__(self, image: torch.Tensor) -> None:
        made, finite = bytes_of(image)
        stream = _copy_stream(image.device)
        stream.wait_stream(torch.cuda.current_stream(image.device))
        with torch.cuda.stream(stream):
            self._pixels = torch.empty(made.shape, dtype=made.dtype, pin_memory=True).copy_(made, non_blocking=True)
            self._finite = torch.empty((), dtype=finite.dtype, pin_memory=True).copy_(finite, non_blocking=True)
            # With a blocking event a waiting thread sleeps instead of taking a core.
            self._done: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._done.record(stream)
        for tensor in (made, finite):
            tensor.record_stream(stream)

    def pixels(self) -> Pixels:
        self._done.synchronize()
        _require_numbers(bool(self._finite))
        pixels: Pixels = self._pixels.numpy()
        return np.ascontiguousarray(_in_colour(pixels))


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def bytes_of(image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale an image tensor [..., channels, height, width] from 0–1 to uint8 with channels last, without leaving its device.

    The second result is a scalar tensor, False if some value was not finite. Rounding and clamping match `to_pixels` bit for bit.
    """
    values = image.float().movedim(-3, -1)
    return (values.clamp(0, 1) * 255).round().to(torch.uint8).contiguous(), values.isfinite().all()


def to_pixels(output: Any) -> Pixels:
    """Return the pixels of the first image or video in a pipeline's result, in any form that pipelines return it.

    Raises:
        RequestError: RequestFailed, the model returned NaN or infinity.
    """
    first = output[0]
    if isinstance(first, list | tuple):
        first = np.stack([np.asarray(frame) for frame in first])
    pixels = first.float().movedim(-3, -1).cpu().numpy() if isinstance(first, torch.Tensor) else np.asarray(first)
    if pixels.dtype != np.uint8:
        _require_numbers(bool(np.isfinite(pixels).all()))
        pixels = (pixels.clip(0, 1) * 255).round().astype(np.uint8)
    return np.ascontiguousarray(_in_colour(pixels))


def _require_numbers(finite: bool) -> None:
    if not finite:
        raise RequestError(ErrorCode.REQUEST_FAILED, "the model returned values that are not numbers (NaN or infinity)")


def _in_colour(pixels: Pixels) -> Pixels:
    return pixels.repeat(3, axis=-1) if pixels.shape[-1] == 1 else pixels


def keep_on_device(view: Any) -> None:
    """Make a view's image processors return tensors in place of arrays, so that a decoded image is not copied from the GPU at once.

    Only plain image processors of diffusers' own classes are replaced. Video processors stack arrays, a custom pipeline may do anything
    with them, and classes with `cuts_arrays` on record slice them.
    """
    if not type(view).__module__.startswith("diffusers.") or pipeline_record(type(view)).cuts_arrays:
        return
    for name, part in list(vars(view).items()):
        plain = getattr(type(part), "postprocess", None) is VaeImageProcessor.postprocess
        if plain and not isinstance(part, VideoProcessor):
            own = copy.copy(part)
            own.postprocess = functools.partial(_postprocess, part)
            view.__dict__[name] = own


def _postprocess(processor: Any, image: Any, output_type: str = "pil", *args: Any, **kwargs: Any) -> Any:
    return processor.postprocess(image, "pt" if output_type == "np" else output_type, *args, **kwargs)
