# SPDX-License-Identifier: Apache-2.0
"""Image inputs of a pipeline class, and a request's images under its argument names.

They are read from the arguments of the class's call. The class's record has the rest: references, which the model sees unchanged, and
classes that work without an image although they take one.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import msgspec
from PIL import Image, ImageOps

from diffusion_worker.errors import refused
from diffusion_worker.messages import ImageInput, RequestSpec, Task
from diffusion_worker.runner.families import facts_of, pipeline_record
from diffusion_worker.runner.pipelines.body import FRAMES, TRUE_GUIDANCE, inputs_of

Arguments = dict[str, Any]

IMAGES = ("image", "images", "control_image")
# Arguments that requests provide, so that a class may want them without a default.
GIVEN = frozenset(
    {"self", "prompt", "negative_prompt", "generator", "output_type", "height", "width", "num_inference_steps", "guidance_scale"}
    | {TRUE_GUIDANCE, "mask_image", "strength", *IMAGES, *FRAMES}
)


class ImageInputs(msgspec.Struct, frozen=True):
    """Names of the arguments that get a request's images, how many may come (`most`), and how they are prepared.

    The first image goes to `image`, its mask to `mask`, a second one to `more`. A class with several images but no `more` gets a list. If
    `fitted`, the first is scaled and cropped to the requested size. With `required` a prompt alone does not do.
    """

    image: str
    mask: str | None = None
    more: str | None = None
    most: int = 1
    required: bool = True
    fitted: bool = True

    @property
    def task(self) -> Task:
        """The class's task for a request with images: inpainting if a mask is needed, otherwise an edit."""
        return Task.EDIT if self.mask is None else Task.INPAINT


def image_inputs(pipeline: Any) -> ImageInputs | None:
    """Return a pipeline's arguments for an edit, with a mask if its class needs one; None if it serves no edits.

    It serves none if it takes no prompt or image, needs inputs that requests do not have, or its record says so. For a modular pipeline
    that works with and without a mask, `masked_inputs` returns those with a mask.
    """
    takes, record = inputs_of(pipeline), pipeline_record(type(pipeline))
    image = _first_image(takes)
    if image is None or record.image_or_words or record.no_edit or needs_more(pipeline):
        return None
    references = record.references
    more = "image_reference" if "image_reference" in takes else None
    return ImageInputs(
        image,
        "mask_image" if "mask_image" in takes and not _is_modular(pipeline) else None,
        more=more,
        most=references or (2 if more else 1),
        required=_requires(pipeline, takes, image),
        fitted=not references,
    )


def works_from_words(pipeline: Any) -> bool:
    """Return whether the pipeline serves text to image: it takes a prompt, needs no other input, and any image is known to be optional."""
    takes = inputs_of(pipeline)
    if "prompt" not in takes or needs_more(pipeline):
        return False
    inputs = image_inputs(pipeline)
    return not inputs.required if inputs else _first_image(takes) is None or pipeline_record(type(pipeline)).image_or_words


def masked_inputs(pipeline: Any) -> ImageInputs | None:
    """Return a modular pipeline's arguments for an image and its mask; None if it lacks either or a prompt, and for classic pipelines."""
    both = _is_modular(pipeline) and {"prompt", "image", "mask_image"} <= inputs_of(pipeline).keys()
    return ImageInputs("image", "mask_image") if both else None


def conditioning_of(takes: ImageInputs, spec: RequestSpec, frames: Sequence[bytes]) -> Arguments:
    """Make images of a request's `frames`, and return them under the class's argument names; the mask too.

    If `takes.fitted`, the first image is scaled and cropped to the requested size. The mask is always fitted to it.

    Raises:
        RequestError: InvalidRequest, the number of images is not from 1 to `most`, or a mask is missing or superfluous.
    """
    if not 1 <= len(spec.images) <= takes.most:
        expected = "one image" if takes.most == 1 else f"1 to {takes.most} images"
        count = len(spec.images)
        raise refused("image", expected, count)
    if (spec.mask is None) != (takes.mask is None):
        raise refused("mask", "no mask" if takes.mask is None else "a mask", "no mask" if spec.mask is None else "a mask")
    images = [_image(item, frames) for item in spec.images]
    size = (spec.width, spec.height) if spec.width and spec.height else None
    if takes.fitted and size:
        images[0] = _cover(images[0], size, Image.Resampling.LANCZOS)
    first: Any = images[0] if takes.more or takes.most == 1 else images
    arguments: Arguments = {takes.image: first}
    if takes.more and len(images) > 1:
        arguments[takes.more] = images[1]
    if takes.mask is not None and spec.mask is not None:
        mask = _image(spec.mask, frames)
        arguments[takes.mask] = _cover(mask, size, Image.Resampling.NEAREST) if size else mask
    return arguments


def strength_of(pipeline: Any, spec: RequestSpec) -> float | None:
    """Return the strength to pass to the class, or None for its default.

    If the request has none and the default leaves no step, it is the least strength that leaves one.

    Raises:
        RequestError: InvalidRequest, the strength of the request leaves none of its steps.
    """
    takes = inputs_of(pipeline)
    strength = takes.get("strength") if spec.strength is None else spec.strength
    steps = spec.steps or takes.get("num_inference_steps")
    if not strength or not steps or _steps_left(pipeline, steps, strength):
        return spec.strength
    if spec.strength is None:
        return min(1.0, math.nextafter(1 / steps, 1))
    least = 1 / steps
    raise refused("strength", f"at least {least:.3g}, so that one of {steps} steps is left", strength)


def _steps_left(pipeline: Any, steps: int, strength: float) -> int:
    """Return the steps that a strength leaves.

    Some classes drop a part of a step (Stable Diffusion), others count it as a whole one (Stable Diffusion 3, Flux).
    """
    facts = facts_of(type(pipeline))
    return steps - int(steps - steps * strength) if facts and facts.counts_parts else int(steps * strength)


def _cover(image: Image.Image, size: tuple[int, int], resampling: Image.Resampling) -> Image.Image:
    """Scale an image until it covers the size, and cut what is too long evenly at both sides, so that nothing is distorted."""
    return image if image.size == size else ImageOps.fit(image, size, method=resampling)


def _image(item: ImageInput, frames: Sequence[bytes]) -> Image.Image:
    height, width, channels = item.shape
    return Image.frombytes("L" if channels == 1 else "RGB", (width, height), bytes(frames[item.frame]))


def needs_more(pipeline: Any) -> bool:
    """Return whether a prompt and an image are not enough for the class, or it takes no prompt.

    Then another argument has no default, or it takes several kinds of images. A modular pipeline with a prompt needs no more.
    """
    takes = inputs_of(pipeline)
    if "prompt" not in takes:
        return True
    if _is_modular(pipeline):
        return False
    parameters = inspect.signature(type(pipeline).__call__).parameters.values()
    wanted = [item for item in parameters if item.default is item.empty and item.kind is item.POSITIONAL_OR_KEYWORD]
    images = [name for name in (*IMAGES, "example_image", "control_mask") if name in takes]
    return len(images) > 1 or any(item.name not in GIVEN for item in wanted)


def _first_image(takes: Mapping[str, Any]) -> str | None:
    return next((argument for argument in IMAGES if argument in takes), None)


def _requires(pipeline: Any, takes: Mapping[str, Any], image: str) -> bool:
    """Return whether every request must bring an image.

    Blocks and records say so themselves. Other classes of diffusers always need it. A custom class can do without if its image has a
    default, and it takes neither a strength nor a mask.
    """
    if _is_modular(pipeline):
        return any(item.name == image and item.required for item in pipeline._blocks.inputs)
    record = pipeline_record(type(pipeline))
    if record.references:
        return record.needs_reference
    # A custom class with a default for its image is believed to work without one.
    parameter = inspect.signature(type(pipeline).__call__).parameters.get(image)
    has_default = parameter is None or parameter.default is not parameter.empty
    theirs = type(pipeline).__module__.startswith("diffusers.")
    return theirs or not has_default or "strength" in takes or "mask_image" in takes


def _is_modular(pipeline: Any) -> bool:
    return isinstance(pipeline, diffusers.ModularPipeline)
