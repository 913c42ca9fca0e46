# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of a rank's weights and adapters, to compare the rank with itself after a sleep.

The probe is a request of few steps, run beside all others on a stepper of its own. It is exact: nothing compiled, cached or merged takes
part, and every rank computes all of it from its own weights. The digest of the result is kept, and its levels in few large cells.

Kernels of a GPU may add in another order each time, so that no two probes have the same digest. Their cells are still alike.
"""

import hashlib
import itertools
import logging
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import torch

from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.memory.checksum import checksum
from diffusion_worker.messages import ErrorReport, ModelInfo, RequestSpec
from diffusion_worker.runner.parallel.agreement import failures_of_all
from diffusion_worker.runner.parallel.rows import Parallel
from diffusion_worker.runner.pipelines.tasks import TaskPipelines
from diffusion_worker.runner.stepping.batch_runner import Compute
from diffusion_worker.runner.stepping.pixels import Pixels, pixels_of
from diffusion_worker.runner.stepping.request_state import DiffusionRequestState
from diffusion_worker.runner.stepping.step_output import StepOutput
from diffusion_worker.runner.stepping.stepper import Stepper, report_of
from diffusion_worker.runner.stepping.tick_meter import TickMeter
from diffusion_worker.runner.warm_up import WarmUpRequest, own_request, plain_variants

log = logging.getLogger(__name__)

PROBE = RequestSpec(request_id="probe", prompt="a probe of the weights", seed=20, steps=1)
# Smaller sides have a latent of a pixel or two, at which some decoders and attention layers break.
SMALLEST_SIDE = 64
# Some pipelines (Mochi) fail with a schedule of a single step.
STEPS = (1, 2)

# An image is kept as the mean levels of cells: at most so many along a side, and at most so many frames.
MOST_CELLS = 16
MOST_FRAMES = 4

T = TypeVar("T")


class Probed(NamedTuple):
    """The result of a probe: the SHA-256 of its image, and the image's `cells_of`."""

    digest: str
    cells: bytes


def adapter_contents(copies: Mapping[int, tuple[str, Iterable[torch.Tensor]]], misapplied: Container[int]) -> dict[int, str]:
    """Return a line for each adapter by id: its identity, a checksum of its tensors, and `misapplied` for an id in `misapplied`."""
    return {
        lora_int_id: f"{identity} {checksum(kept)}" + (" misapplied" if lora_int_id in misapplied else "")
        for lora_int_id, (identity, kept) in sorted(copies.items())
    }


class Probe:
    """The maker of a fingerprint's small image, by a request that shares no batch with others, without adapters and prompt cache.

    `tasks` builds the request's body. `modules` has the model's parts by name, and `compute` calls them.
    """

    def __init__(self, tasks: TaskPipelines, parallel: Parallel, modules: dict[str, torch.nn.Module], compute: Compute) -> None:
        self._tasks = tasks
        self._parallel = parallel
        self._states: dict[str, DiffusionRequestState] = {}
        # There is no prompt cache, because the probe has to run the encoders with the weights that they have now.
        self._stepper = Stepper(self._states, parallel, None)
        self._stepper.serve(modules, None, compute=compute)

    def make(self, model: ModelInfo) -> Probed | None:
        """Return the digest and cells of a small image; all ranks make it together, and ranks that split no weights each compute all of it.

        It is None, on all ranks alike and with a warning in the log, if the model serves no task or every request tried fails.

        Raises:
            RequestError: InsufficientMemory.
        """
        why = f"{model.pipeline} serves no task, so it makes no image"
        for request in probe_requests(model, self._tasks):
            try:
                image = self._image(request)
            except RequestError as error:
                if error.code is ErrorCode.INSUFFICIENT_MEMORY:
                    raise
                why = error.message
                continue
            return Probed(hashlib.sha256(f"{image.shape}\n".encode() + image.tobytes()).hexdigest(), cells_of(image))
        log.warning("no small image can be made for comparison after a wake, so that wakes are verified by checksums alone: %s", why)
        return None

    def _image(self, request: WarmUpRequest) -> Pixels:
        """Run one request alone to its end and return the pixels, a second time as `whole` if its pipeline requires it.

        A failure raises RequestError on every rank.
        """
        spec, output = request.spec, StepOutput()
        body = self._agreed(lambda: self._tasks.body(spec, request.frames))
        self._states[spec.request_id] = DiffusionRequestState(spec, body, exact=True)
        try:
            while self._states:
                self._stepper.advance(list(self._states.values()), output, TickMeter(torch.device("cpu")))
        finally:
            for state in self._states.values():
                state.drop()
            self._states.clear()
        if output.replays and not spec.whole:
            return self._image(msgspec.structs.replace(request, spec=msgspec.structs.replace(spec, whole=True)))
        for failure in output.errors.values():
            raise RequestError(ErrorCode(failure.code), failure.message)
        return self._agreed(lambda: pixels_of(output.images[spec.request_id]))

    def _agreed(self, make: Callable[[], T]) -> T:
        """Return the result of `make` once every rank has one; raise RequestError where any rank failed."""
        failed: dict[str, ErrorReport] = {}
        try:
            made = make()
        except Exception as error:
            failed[PROBE.request_id] = report_of(error, asked=False)
        for failure in failures_of_all(self._parallel, failed).values():
            raise RequestError(ErrorCode(failure.code), failure.message)
        return made


def probe_requests(model: ModelInfo, tasks: TaskPipelines) -> Iterator[WarmUpRequest]:
    """Yield requests to try in turn: the smallest size with one step and with two, then the default size with one and two.

    A deployment whose default size is smaller gets the default size alone, as its limits may allow no more. Other fields are as in `PROBE`.
    They are for the task of the warm-up; a model without any task gets no requests.
    """
    smallest, usual = _smallest(model), (model.default_width, model.default_height, None)
    small = (model.default_width or smallest[0]) * (model.default_height or smallest[1]) < smallest[0] * smallest[1]
    for (width, height, frames), steps in itertools.product([usual] if small else [smallest, usual], STEPS):
        request = own_request(msgspec.structs.replace(PROBE, width=width, height=height, frames=frames, steps=steps), model)
        if request is None:
            return
        [plain] = plain_variants(tasks.pipeline_of(request.spec.task), request.spec.task)
        yield msgspec.structs.replace(request, spec=msgspec.structs.replace(request.spec, **plain.changes))


def _smallest(model: ModelInfo) -> tuple[int, int, int | None]:
    """Return width, height and frames (None for images): the smallest square whose tokens can be split as the options want."""
    unit = math.lcm(model.size_multiple, model.token_pixels * model.tokens_multiple)
    side = max(1, -(-SMALLEST_SIDE // unit)) * unit
    return side, side, model.frame_multiple + 1 if model.kind == "video" else None


def cells_of(image: Pixels) -> bytes:
    """Return the mean levels of an image's cells as bytes, channel by channel; of a video those of its first `MOST_FRAMES` frames. Pure.

    `image` is uint8 [height, width, channels], or with frames before that. There are at most `MOST_CELLS` cells along a side.
    """
    frames = image.reshape(-1, *image.shape[-3:])[:MOST_FRAMES].astype(np.float64)
    for axis in (1, 2):
        count = min(MOST_CELLS, frames.shape[axis])
        edges = np.arange(count) * frames.shape[axis] // count
        sizes = np.diff(np.append(edges, frames.shape[axis]))
        frames = np.add.reduceat(frames, edges, axis=axis) / np.expand_dims(sizes, tuple(range(1, frames.ndim - axis)))
    return np.rint(frames).astype(np.uint8).tobytes()
