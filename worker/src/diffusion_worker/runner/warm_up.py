# SPDX-License-Identifier: Apache-2.0
"""The warm-up on one rank: requests of few steps, run as any other, which leave nothing but the code compiled for them."""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from diffusion_worker.config import WorkerConfig
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import ErrorReport, ImageInput, LoRAUse, ModelInfo, RequestSpec, Task, Tick, WarmTick
from diffusion_worker.runner.pipelines.body import inputs_of
from diffusion_worker.runner.pipelines.description import SIDE
from diffusion_worker.runner.stepping.step_output import StepOutput

log = logging.getLogger(__name__)

GREY, MASKED = 128, 255
Execute = Callable[[Tick, Sequence[bytes]], StepOutput]


class Variant(msgspec.Struct, frozen=True):
    """A form of the warm-up: how many requests run together, and the fields of `RequestSpec` in which they differ from the plain one."""

    images: int = 1
    changes: dict[str, Any] = {}


class WarmUpRequest(msgspec.Struct, frozen=True):
    """A request with the images that it starts from. `frames` has the image's bytes, then the mask's, or nothing for text to image."""

    spec: RequestSpec
    frames: list[bytes]


PLAIN = (Variant(),)


def plain_variants(pipeline: Any, task: Task) -> list[Variant]:
    """Return a list with the plain variant alone.

    If the task starts from an image and the class takes a strength, it is 1: a part of a single step is no step.
    """
    return [Variant(changes={"strength": 1.0} if task is not Task.GENERATE and "strength" in inputs_of(pipeline) else {})]


def compiled_variants(pipeline: Any, task: Task, *, most_images: int, ranks: int, adapter: int | None) -> list[Variant]:
    """List the runs that make torch compile all versions of the code, so that no request waits for it.

    The first is plain. If the class guides by default, a run without guidance has half the rows. With larger batches, a run of more images
    gives a rank several rows. With an adapter, each run comes a second time with it.
    """
    [plain] = rows = plain_variants(pipeline, task)
    guidance = inputs_of(pipeline).get("guidance_scale")
    if isinstance(guidance, int | float) and guidance > 1:
        rows.append(Variant(changes=plain.changes | {"guidance_scale": 1.0}))
    if most_images > 1:
        rows.append(Variant(min(most_images, 2 * ranks), plain.changes))
    if adapter is None:
        return rows
    use = {"loras": [LoRAUse(adapter, 1.0)]}
    return rows + [Variant(variant.images, variant.changes | use) for variant in rows]


def warm_up(config: WorkerConfig, model: ModelInfo, execute: Execute, *, variants: Sequence[Variant] = PLAIN) -> list[WarmTick]:
    """Run a request, in each variant, for every configured size; return a measurement of each run, none for a model without tasks.

    `execute` makes a tick. A request of a single step that fails is repeated with two, because some pipelines need them.

    Raises:
        RequestError: a request failed; the message says which and why.
    """
    ticks = []
    for request, variant in itertools.product(warm_up_requests(config, model), variants):
        spec, made = request.spec, _make(execute, request, variant)
        if isinstance(made, ErrorReport) and spec.steps == 1:
            # Some pipelines (Mochi) fail with a schedule of a single step.
            spec = msgspec.structs.replace(spec, steps=2)
            made = _make(execute, msgspec.structs.replace(request, spec=spec), variant)
        if isinstance(made, ErrorReport):
            size = f"{spec.width}x{spec.height}" if spec.width else "the default size"
            asked = f"{spec.task} with {spec.steps} steps in {size} by {model.pipeline}"
            raise RequestError(ErrorCode(made.code), f"warm-up: {asked}: {made.message}")
        ticks.append(made)
    return ticks


def warm_up_requests(config: WorkerConfig, model: ModelInfo) -> Iterator[WarmUpRequest]:
    """Yield a request for each configured size, or one for the deployment's default size.

    It is made from text, or from a grey image if the model needs one. A model without tasks gets none,
    and a warning in the log.
    """
    sizes: list[tuple[int | None, int | None]] = [*config.warmup_sizes] or [(config.defaults.width, config.defaults.height)]
    for number, (width, height) in enumerate(sizes):
        spec = RequestSpec(
            request_id=f"warm-up-{number}", prompt="warm-up", seed=number, width=width, height=height, steps=config.warmup_steps
        )
        if (request := own_request(spec, model)) is not None:
            yield request
        else:
            log.warning("no warm-up: %s serves no task, so that no warm-up request can be made", model.pipeline)


def own_request(spec: RequestSpec, model: ModelInfo) -> WarmUpRequest | None:
    """Return a request of the warm-up's task: from text, or from a grey image; None if the model serves no task."""
    task = task_of(model)
    if task is None:
        return None
    return WarmUpRequest(spec, []) if task is Task.GENERATE else _from_image(spec, task, model)


def task_of(model: ModelInfo) -> Task | None:
    """Return the warm-up's task: text to image if the model serves it, otherwise its first; None without tasks."""
    return Task.GENERATE if Task.GENERATE in model.tasks else next(iter(model.tasks), None)


def _from_image(spec: RequestSpec, task: Task, model: ModelInfo) -> WarmUpRequest:
    # The image has the size of the request, as those that the server sends.
    width, height = spec.width or model.default_width or SIDE, spec.height or model.default_height or SIDE
    frames = [bytes([GREY]) * (width * height * 3)]
    mask = None
    if task is Task.INPAINT:
        frames.append(bytes([MASKED]) * (width * height))
        mask = ImageInput(1, (height, width, 1))
    images = [ImageInput(0, (height, width, 3))]
    return WarmUpRequest(msgspec.structs.replace(spec, task=task, width=width, height=height, images=images, mask=mask), frames)


def _make(execute: Execute, request: WarmUpRequest, variant: Variant) -> ErrorReport | WarmTick:
    """Run all images of a variant together to their end; return the times, or the first error after dropping the others."""
    name, frames = request.spec.request_id, request.frames
    specs = [msgspec.structs.replace(request.spec, request_id=f"{name}-{number}", **variant.changes) for number in range(variant.images)]
    left, joining = {spec.request_id for spec in specs}, specs
    longest_s, steps_s, replayed = 0.0, list[float](), ""
    for number in itertools.count(1):
        tick = Tick(number, joining, frames=[len(frames)] * len(joining) if frames else [])
        started = time.monotonic()
        output = execute(tick, frames * len(joining))
        longest_s = max(longest_s, time.monotonic() - started)
        steps_s += [output.denoise_seconds] if output.denoise_seconds else []
        replayed = next(iter(output.replays.values()), replayed)
        joining = [msgspec.structs.replace(spec, whole=True) for spec in specs if spec.request_id in output.replays]
        if output.errors:
            execute(Tick(number + 1, leave=sorted(left - output.errors.keys())), [])
            return next(iter(output.errors.values()))
        left -= output.images.keys()
        if not left:
            spec = msgspec.structs.replace(specs[0], whole=bool(replayed))
            return WarmTick(spec, variant.images, min(steps_s, default=longest_s), longest_s, replayed)
    raise AssertionError("unreachable")
