# SPDX-License-Identifier: Apache-2.0
"""The bounded queue as requests meet it: a place from their arrival to their end, or Overloaded with a time to come back.

All requests have a place: held ones, those that wait for adapters or for a step, and those that run. `QueueBounds` decides on
the times and the bounds.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.requests.admission import GenerationParams
from diffusion_worker.engine.scheduling.queue_bounds import Bound, Place, QueueBounds, Refusal
from diffusion_worker.engine.scheduling.step_loop import StepLoop
from diffusion_worker.engine.state.lifecycle import REFUSALS, EngineLife
from diffusion_worker.engine.state.state_document import EngineState
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import ImageInput, RequestSpec

# Seconds until the first step of a model that does not serve, where its state does not say: a wake is a matter of seconds.
COLD_S = 5.0
BOUNDS = {
    Bound.REQUESTS: ("--max-queued", "waiting requests"),
    Bound.SECONDS: ("--max-queued-seconds", "seconds of work in the queue"),
    Bound.BYTES: ("--max-queued-bytes", "bytes of images in the queue"),
}


class QueuePlace:
    """The place of one request in the bounded queue, held from its arrival to its end."""

    def __init__(self, bounds: QueueBounds, place: Place, steps: StepLoop, clock: Callable[[], float]) -> None:
        self._bounds = bounds
        self._place = place
        self._steps = steps
        self._clock = clock

    def start(self) -> None:
        """Note that the first image of the request joins a step; harmless when repeated."""
        self._bounds.start(self._place, self._clock())

    def submitted(self, image_ids: Sequence[str]) -> None:
        """Note that the request's images are in the scheduler's queue, which from now on estimates the work left of them."""
        self._bounds.revise(self._place, lambda: sum(map(self._steps.left_s, image_ids)))


class RequestQueue:
    """Admission of one engine's requests to the bounded queue, with counts of refusals by bound."""

    def __init__(self, config: WorkerConfig, life: EngineLife, steps: StepLoop, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.bounds = QueueBounds(config.queue)
        self.refusals = Counter[Bound]()
        self._config = config
        self._life = life
        self._steps = steps
        self._clock = clock

    @contextmanager
    def place(self, params: GenerationParams) -> Iterator[QueuePlace]:
        """Hold a place for a request while entered.

        Raises:
            RequestError: Overloaded, with the bound and the time at which room is expected.
        """
        estimate = partial(self._expected_s, _as_spec(params, self._config), params.n)
        got = self.bounds.admit(estimate, _image_bytes(params), self._clock(), cold_s=self._cold_s())
        if isinstance(got, Refusal):
            self.refusals[got.bound] += 1
            raise _overloaded(got)
        done = False
        try:
            yield QueuePlace(self.bounds, got, self._steps, self._clock)
            done = True
        finally:
            self.bounds.end(got, self._clock(), done=done)

    def _expected_s(self, spec: RequestSpec, images: int) -> float:
        return self._steps.expected_s(spec) * images

    def _cold_s(self) -> float:
        """Return the seconds until the model serves, as its state suggests; 0 if it serves."""
        if self._life.state is EngineState.READY:
            return 0.0
        return (REFUSALS[self._life.state][2] if self._life.state in REFUSALS else None) or COLD_S


def _image_bytes(params: GenerationParams) -> int:
    images = [*params.images, *(image for image in (params.mask, params.own_mask) if image is not None)]
    return sum(len(image.pixels) for image in images)


def _as_spec(params: GenerationParams, config: WorkerConfig) -> RequestSpec:
    """Return the request as a spec with just the values that decide its expected cost."""
    defaults = config.defaults
    return RequestSpec(
        request_id="",
        prompt="",
        seed=0,
        height=params.height or defaults.height,
        width=params.width or defaults.width,
        steps=params.steps or defaults.steps,
        guidance_scale=defaults.guidance_scale if params.guidance_scale is None else params.guidance_scale,
        exact=params.exact or config.exact,
        task=params.task,
        images=[ImageInput(frame, (image.height, image.width, image.channels)) for frame, image in enumerate(params.images)],
        strength=params.strength,
    )


def _overloaded(refusal: Refusal) -> RequestError:
    option, unit = BOUNDS[refusal.bound]
    bound = f"expected at most {refusal.most:.0f} {unit} ({option}), found {refusal.found:.0f} with this request"
    again_s = refusal.retry_after_s
    message = f"the queue: {bound}; room is expected in {again_s:.0f} s"
    return RequestError(ErrorCode.OVERLOADED, message, retry_after_s=again_s)
