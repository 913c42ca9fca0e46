# SPDX-License-Identifier: Apache-2.0
"""The report of a tick with images. The thread that sends it makes it from the pipelines' results."""

import logging
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from diffusion_worker.messages import Failed, Finished, Preview, StageSeconds, TickDone
from diffusion_worker.ranks.output import Said
from diffusion_worker.runner.model_call.faults import require_usable_rank
from diffusion_worker.runner.stepping.pixels import Pixels, RawImage, pixels_of
from diffusion_worker.runner.stepping.stage_clock import StageClock
from diffusion_worker.runner.stepping.step_output import StepOutput
from diffusion_worker.runner.stepping.stepper import report_of

log = logging.getLogger(__name__)

# Height, width and colours. A video has its frames before them; its preview is the first frame.
IMAGE_DIMENSIONS = 3


class ImageReport:
    """A tick's results whose images are still on the device.

    The rank's main thread makes it; the thread that sends it turns the images into frames.
    """

    def __init__(self, done: TickDone, output: StepOutput) -> None:
        self._done = done
        self._images = output.images
        self._previews = output.previews
        self._clocks = output.clocks

    def begin_copies(self) -> None:
        """Start the images' conversion and copy on the device, without waiting. Call it on the thread that queued the tick's work."""
        for image in (*self._images.values(), *(preview.image for preview in self._previews)):
            if isinstance(image, RawImage):
                image.begin_copy()

    def make(self) -> Said:
        """Convert images and previews to frames, and return them with the completed `TickDone`. An error in an image fails that request.

        A preview that cannot be made is logged and left out.

        Raises:
            RankFault: the device cannot be used any more.
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
        """Yield the previews that can be made, of a video with its first frame only, and append their pixels to `frames`."""
        for preview in self._previews:
            try:
                pixels = pixels_of(preview.image)
            except Exception as error:
                require_usable_rank(error)
                log.warning("a preview cannot be made: %s", str(error))
                continue
            image = pixels if pixels.ndim == IMAGE_DIMENSIONS else pixels[0]
            yield Preview(preview.request_id, preview.number, len(frames), image.shape)
            frames.append(image.data.cast("B"))


def _made(image: Any, clock: StageClock) -> tuple[Pixels, StageSeconds]:
    """Return an image's pixels, and the seconds of its stages."""
    # The report of the clock comes first: it waits for the device's work on the image, which is no part of making pixels.
    stages = clock.report()
    started_s = time.perf_counter()
    pixels = pixels_of(image)
    return pixels, msgspec.structs.replace(stages, post=time.perf_counter() - started_s)
