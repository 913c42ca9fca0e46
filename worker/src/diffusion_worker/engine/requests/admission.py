# SPDX-License-Identifier: Apache-2.0
"""Validation of a request before it costs anything. Pure."""

import math

import msgspec

from diffusion_worker.config import RequestDefaults, RequestLimits
from diffusion_worker.engine.scheduling.request_class import RequestClass, is_guided
from diffusion_worker.errors import ConfigError, RequestError, refused
from diffusion_worker.messages import ModelInfo, Task

MAX_SEED = 2**63 - 1
# Largest strength of an adapter in a request, to either side of 0.
MAX_LORA_SCALE = 4.0
# Hints for requests whose task the model does not serve, by that task and one that it serves.
HINTS = {
    (Task.GENERATE, Task.EDIT): ": this model needs an image, send one to /v1/images/edits",
    (Task.GENERATE, Task.INPAINT): ": this model needs an image and a mask, send them to /v1/images/edits",
    (Task.EDIT, Task.INPAINT): ": this model needs a mask beside the image",
    (Task.INPAINT, Task.EDIT): ": this model takes no mask",
}


class InputImage(msgspec.Struct, frozen=True):
    """A client's image in decoded bytes, height x width x `channels` without padding: RGB, or a mask, in which 255 is made again."""

    pixels: bytes
    height: int
    width: int
    channels: int = 3


class AdapterChoice(msgspec.Struct, frozen=True):
    """An adapter's name in a `field` of a request, and its strength there; None takes the scale that was declared with the adapter."""

    name: str
    scale: float | None = None
    field: str = "lora"


class GenerationParams(msgspec.Struct, frozen=True, kw_only=True):
    """An image request as the edge parsed it. A None leaves the value to the worker or the pipeline; `model` may name an adapter."""

    prompt: str
    model: str | None = None
    negative_prompt: str | None = None
    n: int = 1
    seed: int | None = None
    height: int | None = None
    width: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    # Adapters beside the one that `model` may name. `lora_scale` is for the only adapter without a scale here.
    loras: list[AdapterChoice] = []
    lora_scale: float | None = None
    exact: bool = False
    # None: as fast as the worker can. True: by its step cache, if it has one. False: with every step computed.
    accelerated: bool | None = None
    task: Task = Task.GENERATE
    images: list[InputImage] = []
    mask: InputImage | None = None
    # The first image's transparency as a mask, for a model that only inpaints.
    own_mask: InputImage | None = None
    strength: float | None = None
    previews: int = 0


def with_own_mask(params: GenerationParams, model: ModelInfo) -> GenerationParams:
    """Turn an edit into an inpainting if the model only inpaints, with the first image's transparency as its mask.

    Return any other request unchanged, also one with a mask or without transparency.
    """
    if params.task is not Task.EDIT or params.own_mask is None or not only_inpaints(model):
        return params
    return msgspec.structs.replace(params, task=Task.INPAINT, mask=params.own_mask)


def only_inpaints(model: ModelInfo) -> bool:
    """Return whether the model can only edit images with a mask."""
    return Task.INPAINT in model.tasks and Task.EDIT not in model.tasks


def with_defaults(params: GenerationParams, defaults: RequestDefaults, limits: RequestLimits, model: ModelInfo) -> GenerationParams:
    """Return the request with defaults for steps, guidance scale and size where it leaves them open.

    An edit without a size takes that of its image, scaled down to the limits. A request with only a height or only a width keeps just that.
    """
    height, width = params.height, params.width
    if height is None and width is None:
        height, width = size_of_edit(params.images[0], limits, model) if params.images else (defaults.height, defaults.width)
    return msgspec.structs.replace(
        params,
        steps=usual_steps(defaults, limits, model) if params.steps is None else params.steps,
        guidance_scale=defaults.guidance_scale if params.guidance_scale is None else params.guidance_scale,
        height=height,
        width=width,
    )


def usual_steps(defaults: RequestDefaults, limits: RequestLimits, model: ModelInfo) -> int | None:
    """Return the steps of a request that names none, at most the limit's; None where only the pipeline knows."""
    if defaults.steps is not None or model.default_steps is None:
        return defaults.steps
    return min(model.default_steps, limits.max_steps)


def size_of_edit(image: InputImage, limits: RequestLimits, model: ModelInfo) -> tuple[int, int]:
    """Return an edit's height and width: those of its image, scaled down to the limits and to sizes that the model can make."""
    # Sides in multiples of this step make a number of tokens that the ranks can share.
    step = math.lcm(model.size_multiple, model.token_pixels * model.tokens_multiple)
    longest = min((model.max_height or image.height) / image.height, (model.max_width or image.width) / image.width)
    scale = min(1.0, longest, math.sqrt(limits.max_pixels / (image.height * image.width)))
    height = max(step, int(image.height * scale) // step * step)
    width = max(step, int(image.width * scale) // step * step)
    # A narrow image whose short side grew to one step may exceed the limit now.
    if height > width:
        return min(height, limits.max_pixels // width // step * step), width
    return height, min(width, limits.max_pixels // height // step * step)


def check(params: GenerationParams, limits: RequestLimits, model: ModelInfo) -> None:
    """Check a request against the limits and the model; raise RequestError (InvalidRequest) with the field, what was expected and found."""
    check_served(params.task, model)
    _check_images(params, model)
    if model.kind != "image":
        raise refused("model", "a pipeline that makes images", f"{model.pipeline}, which makes a {model.kind}")
    check_form(params, limits)
    check_size(params, limits, model)


def check_form(params: GenerationParams, limits: RequestLimits) -> None:
    """Check a request as far as possible before the model is known; raises RequestError (InvalidRequest)."""
    if not params.prompt.strip():
        raise refused("prompt", "a text", "an empty one")
    if (characters := len(params.prompt)) > limits.max_prompt_chars:
        raise refused("prompt", f"at most {limits.max_prompt_chars} characters", characters)
    if (characters := len(params.negative_prompt or "")) > limits.max_prompt_chars:
        raise refused("negative_prompt", f"at most {limits.max_prompt_chars} characters", characters)
    if not 1 <= params.n <= limits.max_images:
        raise refused("n", f"1 to {limits.max_images}", params.n)
    if params.seed is not None and not 0 <= params.seed <= MAX_SEED - limits.max_images:
        raise refused("seed", f"0 to {MAX_SEED - limits.max_images}", params.seed)
    if params.steps is not None and not 1 <= params.steps <= limits.max_steps:
        raise refused("num_inference_steps", f"1 to {limits.max_steps}", params.steps)
    if params.guidance_scale is not None and not 0 <= params.guidance_scale <= 100:
        raise refused("guidance_scale", "0 to 100", params.guidance_scale)


def check_defaults(defaults: RequestDefaults, limits: RequestLimits, model: ModelInfo) -> None:
    """Check that the loaded model can make the default size, or without one, that `--max-pixels` allows the model's own size.

    Raises ConfigError with the option's name.
    """
    if defaults.width is None or defaults.height is None:
        _check_own_size(limits, model)
        return
    try:
        check_size(GenerationParams(prompt="", width=defaults.width, height=defaults.height), limits, model)
    except RequestError as error:
        raise ConfigError(f"--default-size {defaults.width}x{defaults.height}: {error.message}") from None


def _check_own_size(limits: RequestLimits, model: ModelInfo) -> None:
    """Check that the limit allows the model's own size: no smaller one is chosen, as many models make poor images of untrained sizes."""
    width, height = model.default_width or 0, model.default_height or 0
    # An edit takes the size of its image.
    own_pixels = width * height
    if Task.GENERATE in model.tasks and own_pixels > limits.max_pixels:
        expected = f"at least {own_pixels}, for the model's own default size {width}x{height}, or a smaller --default-size"
        raise ConfigError(f"--max-pixels: expected {expected}, found {limits.max_pixels}")


def check_memory(params: GenerationParams, model: ModelInfo, most_load: float) -> None:
    """Raise RequestError (InvalidRequest) for an image that would not fit in memory even alone.

    `most_load` is the largest load of a step (`RequestClass.load`) that may fit; infinite while none is known not to.
    """
    width, height = params.width or model.default_width, params.height or model.default_height
    if not width or not height or math.isinf(most_load):
        return
    seen = sum(image.height * image.width for image in params.images) if model.references else 0
    kind = RequestClass(height, width, model.default_frames, guided=is_guided(params.guidance_scale), exact=False, references=seen)
    if kind.load > most_load:
        pixels = width * height
        most_pixels = int(pixels * most_load / kind.load)
        raise refused("size", f"at most {most_pixels} pixels, which is what fits in memory", f"{kind} ({pixels} pixels)")


def check_size(params: GenerationParams, limits: RequestLimits, model: ModelInfo) -> None:
    """Check a request's size against the model's multiple and maximum, the split by `--sequence`, and the limit on pixels.

    Without both width and height nothing is checked. Raises RequestError (InvalidRequest).
    """
    if params.width is None or params.height is None:
        return
    size = f"{params.width}x{params.height}"
    if params.width < model.size_multiple or params.height < model.size_multiple:
        raise refused("size", f"at least {model.size_multiple}x{model.size_multiple}", size)
    if params.width % model.size_multiple or params.height % model.size_multiple:
        raise refused("size", f"width and height that are multiples of {model.size_multiple}", size)
    if (model.max_width or params.width) < params.width or (model.max_height or params.height) < params.height:
        raise refused("size", f"at most {model.max_width}x{model.max_height}, the largest for which the model has positions", size)
    tokens = (params.width // model.token_pixels) * (params.height // model.token_pixels)
    if tokens % model.tokens_multiple:
        token = f"{model.token_pixels}x{model.token_pixels}"
        whole = f"is a multiple of {model.tokens_multiple} (--sequence)"
        raise refused("size", f"a size whose number of tokens, of {token} pixels each, {whole}", size)
    if params.width * params.height > limits.max_pixels:
        raise refused("size", f"at most {limits.max_pixels} pixels", size)


def check_served(task: Task, model: ModelInfo) -> None:
    """Raise RequestError (InvalidRequest) with the reason if the model does not serve a task."""
    if model.kind == "image" and task not in model.tasks:
        served = " and ".join(model.tasks) or "no image route"
        hint = next((HINTS[task, other] for other in model.tasks if (task, other) in HINTS), "")
        raise refused("model", f"a pipeline that serves {task}", f"{model.pipeline}, which serves {served}{hint}")


def check_image_count(count: int, model: ModelInfo) -> None:
    """Raise RequestError (InvalidRequest) if an edit has no image, or more than the model takes."""
    if not 1 <= count <= model.max_input_images:
        expected = "one image" if model.max_input_images == 1 else f"1 to {model.max_input_images} images"
        raise refused("image", f"{expected} for {model.pipeline}", count)


def _check_images(params: GenerationParams, model: ModelInfo) -> None:
    """Refuse an edit with too few or too many images, a mask of another size, or a strength outside (0, 1].

    The RequestError (InvalidRequest) says what the model takes. Requests of task GENERATE pass.
    """
    if params.task is Task.GENERATE:
        return
    check_image_count(len(params.images), model)
    if params.mask is not None and (params.mask.height, params.mask.width) != (params.images[0].height, params.images[0].width):
        expected = f"the size of the image, {params.images[0].width}x{params.images[0].height}"
        raise refused("mask", expected, f"{params.mask.width}x{params.mask.height}")
    if params.strength is not None and not 0 < params.strength <= 1:
        raise refused("strength", "more than 0 and at most 1", params.strength)
