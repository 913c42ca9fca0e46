# SPDX-License-Identifier: Apache-2.0
"""The report of a tick that brought images: made of what their pipelines returned, in the thread that sends it."""

import logging
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from diffusion_worker.errors import RequestError
from diffusion_worker.messages import Failed, Finished, Preview, StageSeconds, TickDone
from diffusion_worker.ranks.output import Said
from diffusion_worker.runner.stepping.pixels import Pixels, RawImage, pixels_of
from diffusion_worker.runner.stepping.stage_clock import StageClock
from diffusion_worker.runner.stepping.stepper import StepOutput, report_of

log = logging.getLogger(__name__)

# Height, width and colours; a video has its frames before them, and is shown by its first.
IMAGE_DIMENSIONS = 3


class ImageReport:
    """Report of a tick, from its end on the rank's main thread to the bytes on the wire."""

    def __init__(self, done: TickDone, output: StepOutput) -> None:
        self._done = done
        self._images = output.images
        self._previews = output.previews
        self._clocks = output.clocks

    def begin_copies(self) -> None:
        """Have the device begin with its part; to be called where it was given the rest of the tick's work."""
        for image in (*self._images.values(), *(preview.image for preview in self._previews)):
            if isinstance(image, RawImage):
                image.begin_copy()

    def make(self) -> Said:
        """The report with its frames. A failed image fails its request; a failed preview is dropped.

        Raises:
            RankFault: the device is lost.
        """
        finished: list[Finished] = []
        failed = list(self._done.failed)
        frames: list[memoryview] = []
        for request_id, image in self._images.items():
            try:
                pixels, stages = _made(image, self._clocks[request_id])
            except Exception as error:
                failed.append(Failed(request_id, report_of(error, asked=True)))
                continue
            finished.append(Finished(request_id, len(frames), pixels.shape, stages))
            frames.append(pixels.data.cast("B"))
        previews = list(self._made_previews(frames))
        return msgspec.structs.replace(self._done, finished=finished, failed=failed, previews=previews), frames

    def _made_previews(self, frames: list[memoryview]) -> Iterator[Preview]:
        """Adds their frames."""
        for preview in self._previews:
            try:
                pixels = pixels_of(preview.image)
            except RequestError as error:
                log.warning("a preview cannot be made: %s", error.message)
                continue
            image = pixels if pixels.ndim == IMAGE_DIMENSIONS else pixels[0]
            yield Preview(preview.request_id, preview.number, len(frames), image.shape)
            frames.append(image.data.cast("B"))


def _made(image: Any, clock: StageClock) -> tuple[Pixels, StageSeconds]:
    """An image's pixels, and what it took in all."""
    # First, as it waits for what the device has to do for the image: that is no part of making pixels of it.
    stages = clock.report()
    started_s = time.perf_counter()
    pixels = pixels_of(image)
    return pixels, msgspec.structs.replace(stages, post=time.perf_counter() - started_s)
