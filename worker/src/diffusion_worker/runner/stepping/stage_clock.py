# SPDX-License-Identifier: Apache-2.0
"""What one request took of a rank: seconds of the model calls it was in, by stage, and the most memory of its ticks."""

import enum

from diffusion_worker.messages import StageSeconds
from diffusion_worker.runner.model_call.call import ModelCall
from diffusion_worker.runner.stepping.tick_meter import StageSpan

DECODES = frozenset({"decode", "tiled_decode"})


class Stage(enum.Enum):
    """What a model call does for a request."""

    ENCODE = "encode"
    DENOISE = "denoise"
    DECODE = "decode"


def stage_of(call: ModelCall, steps_done: int) -> Stage:
    """The stage of a request's call. What is called after steps and encodes nothing makes the image of what they left."""
    if call.denoises:
        return Stage.DENOISE
    encodes = steps_done == 0 or call.method == "encode"
    return Stage.ENCODE if encodes and call.method not in DECODES else Stage.DECODE


class StageClock:
    """Of one request, from its begin to its end. Calls shared with others count in full."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._spans: list[tuple[Stage, StageSpan]] = []

    def add(self, stage: Stage, span: StageSpan) -> None:
        """A call that the request was in."""
        self._spans.append((stage, span))

    def report(self) -> StageSeconds:
        """All of it but what it takes to make pixels; waits for the device, in any thread."""
        seconds = {stage.value: 0.0 for stage in Stage}
        for stage, span in self._spans:
            seconds[stage.value] += span.seconds
        return StageSeconds(**seconds, peak_bytes=self.peak_bytes)
