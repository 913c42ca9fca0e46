# SPDX-License-Identifier: Apache-2.0
"""The images of one admitted request: the specs for the ranks, and the results."""

import asyncio
import secrets
import time
from contextlib import ExitStack

import msgspec

from diffusion_worker.engine.requests.admission import GenerationParams, InputImage
from diffusion_worker.engine.requests.queueing import QueuePlace
from diffusion_worker.engine.scheduling.step_loop import FinishedPixels, OnEvent, StepLoop
from diffusion_worker.engine.state.request_events import FinishedImage, Timings
from diffusion_worker.messages import ImageInput, LoRAUse, Recipe, RequestSpec


class AdmittedRequest(msgspec.Struct, frozen=True):
    """A request's data beside its parameters. `started_s` is the time of its acceptance, from which its time in the queue counts."""

    request_id: str
    started_s: float
    uses: list[LoRAUse]
    recipe: Recipe
    accelerated: bool
    place: QueuePlace


async def make_images(steps: StepLoop, params: GenerationParams, work: AdmittedRequest, *, on_event: OnEvent | None) -> list[FinishedImage]:
    """Make `n` images with the seeds `seed`, `seed + 1`, …, the first random if not given; the first error cancels the others."""
    first_seed = secrets.randbelow(2**32) if params.seed is None else params.seed
    waited_s = time.monotonic() - work.started_s
    specs = [_spec(params, work, index, first_seed + index) for index in range(params.n)]
    frames = [image.pixels for image in _input_images(params)]
    with ExitStack() as stack:
        outcomes = [
            steps.submit(spec, frames, index=index, on_event=on_event, on_join=work.place.start) for index, spec in enumerate(specs)
        ]
        work.place.submitted([spec.request_id for spec in specs])
        for spec in specs:
            stack.callback(steps.forget, spec.request_id)
        made = await asyncio.gather(*outcomes)
    return [_image(spec, outcome, work, waited_s) for spec, outcome in zip(specs, made, strict=True)]


def _input_images(params: GenerationParams) -> list[InputImage]:
    """List what goes to the ranks as frames: the images to edit in the client's order, then the mask if there is one."""
    return [*params.images, *([params.mask] if params.mask else [])]


def _image(spec: RequestSpec, made: FinishedPixels, work: AdmittedRequest, waited_s: float) -> FinishedImage:
    stages, total_s = made.stages, time.monotonic() - work.started_s
    timings = Timings(waited_s + made.queued_s, stages.encode, stages.denoise, stages.decode, stages.post, total_s)
    return FinishedImage(made.pixels, made.height, made.width, spec.seed, timings, stages.peak_bytes)


def _spec(params: GenerationParams, work: AdmittedRequest, index: int, seed: int) -> RequestSpec:
    inputs = [ImageInput(frame, (item.height, item.width, item.channels)) for frame, item in enumerate(_input_images(params))]
    return RequestSpec(
        request_id=f"{work.request_id}-{index}",
        prompt=params.prompt,
        negative_prompt=params.negative_prompt,
        seed=seed,
        height=params.height,
        width=params.width,
        steps=params.steps,
        guidance_scale=params.guidance_scale,
        loras=work.uses,
        exact=params.exact,
        accelerated=work.accelerated,
        sigmas=work.recipe.sigmas,
        shift=work.recipe.shift,
        task=params.task,
        images=inputs[: len(params.images)],
        mask=inputs[-1] if params.mask else None,
        strength=params.strength,
        previews=params.previews,
    )
