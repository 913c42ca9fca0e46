# SPDX-License-Identifier: Apache-2.0
"""A request's costs on a rank: seconds of its model calls, by stage, and the peak memory of its ticks."""

import enum

from diffusion_worker.messages import StageSeconds
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.stepping.tick_meter import StageSpan

DECODES = frozenset({"decode", "tiled_decode"})


class Stage(enum.Enum):
    """The purpose of a model call in a request."""

    ENCODE = "encode"
    DENOISE = "denoise"
    DECODE = "decode"


def stage_of(call: ModelCall, steps_done: int) -> Stage:
    """Return the stage of a request's call. A call after steps that encodes nothing turns their result into the image."""
    if call.denoises:
        return Stage.DENOISE
    encodes = steps_done == 0 or call.method == "encode"
    return Stage.ENCODE if encodes and call.method not in DECODES else Stage.DECODE


class StageClock:
    """A record of one request's model calls with their stages, and of its peak memory. A merged call counts in full for each request."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._spans: list[tuple[Stage, StageSpan]] = []

    def add(self, stage: Stage, span: StageSpan) -> None:
        """Add a call that the request took part in."""
        self._spans.append((stage, span))

    def report(self) -> StageSeconds:
        """Return the seconds by stage, without the making of pixels, and the peak memory.

        On a GPU this blocks until the calls are done. Any thread may call it.
        """
        seconds = {stage.value: 0.0 for stage in Stage}
        for stage, span in self._spans:
            seconds[stage.value] += span.seconds
        return StageSeconds(**seconds, peak_bytes=self.peak_bytes)
