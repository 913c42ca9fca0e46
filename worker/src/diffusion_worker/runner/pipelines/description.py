# SPDX-License-Identifier: Apache-2.0
"""Facts read from a pipeline: its outputs, their sizes, and its defaults.

Families have different names for the same thing, so several names are tried for each. Absent ones count as 1 or as unknown.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import diffusers
import msgspec
import torch

from diffusion_worker.config import RequestDefaults, RequestLimits
from diffusion_worker.errors import ConfigError
from diffusion_worker.messages import ModelInfo, Task
from diffusion_worker.runner.families import facts_of, pipeline_record
from diffusion_worker.runner.model_call.components import DENOISERS
from diffusion_worker.runner.pipelines.body import FRAMES, default_guidance, inputs_of
from diffusion_worker.runner.pipelines.longest_sides import longest_sides
from diffusion_worker.runner.pipelines.step_support import why_impossible
from diffusion_worker.runner.pipelines.view import modules_of

# Pixels of one latent, along a side and in time, by the names that pipelines give them.
SPATIAL = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_spatial_scale_factor")
TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
# The side for models that have no default size; most were trained for about this one.
SIDE = 512
PROCESSORS = ("image_processor", "video_processor")
# The names of a pipeline's result, and the kind of output that each means.
KINDS = {
    "images": "image", "image": "image", "rgb": "image",
    "frames": "video", "video": "video", "videos": "video",
    "audios": "audio",
}  # fmt: skip


def kind_of(pipeline_class: Any) -> str:
    """Return `image`, `video`, `audio` or `other`: by the name of the class's first result, or a custom class's `worker_makes`."""
    if said := getattr(pipeline_class, "worker_makes", None):
        return str(said)
    return KINDS.get(_result_name(pipeline_class) or "", "other")


def denoiser_of(pipeline: Any) -> torch.nn.Module:
    """Return the pipeline's module under the first name in `DENOISERS` that it has; its steps call it, and adapters change it.

    Raises:
        ConfigError: it has a module under none of these names.
    """
    modules = modules_of(pipeline)
    for name in DENOISERS:
        if name in modules:
            return modules[name]
    raise ConfigError(f"{type(pipeline).__name__} has none of the components {', '.join(DENOISERS)}")


def describe(pipeline: Any, dtype: torch.dtype, weights_bytes: int) -> ModelInfo:
    """Describe the pipeline for the server.

    Raises:
        ConfigError: the pipeline makes neither images nor videos, or cannot run.
    """
    kind = kind_of(type(pipeline))
    if kind not in ("image", "video"):
        found = "makes neither images nor videos, and nothing else is served"
        raise ConfigError(f"--pipeline: {type(pipeline).__name__} {found}; a custom class names the kind in its attribute worker_makes")
    if impossible := why_impossible(type(pipeline)):
        raise ConfigError(f"--pipeline: {type(pipeline).__name__} {impossible}")
    takes = inputs_of(pipeline)
    side = _written_side(pipeline, takes) or _default_side(pipeline)
    longest = longest_sides(denoiser_of(pipeline), latent_pixels(pipeline))
    return ModelInfo(
        pipeline=type(pipeline).__name__,
        dtype=str(dtype).removeprefix("torch."),
        size_multiple=size_multiple(pipeline),
        weights_bytes=weights_bytes,
        kind=kind,
        frame_multiple=_first_number(pipeline, TEMPORAL) or 1,
        default_height=_number(takes.get("height")) or side,
        default_width=_number(takes.get("width")) or side,
        default_frames=next((number for name in FRAMES if (number := _number(takes.get(name)))), None),
        default_steps=_number(takes.get("num_inference_steps")),
        default_guidance_scale=default_guidance(pipeline),
        max_height=longest and longest[0],
        max_width=longest and longest[1],
    )


def with_deployments_size(info: ModelInfo, defaults: RequestDefaults, limits: RequestLimits) -> ModelInfo:
    """Return the description with the deployment's default size in place of the model's own.

    Edits have the size of their image. For a model that only edits, this is the size of the worker's own requests, such as the warm-up.
    It keeps the limit on pixels, and is `SIDE` a side where the model has none.
    """
    width, height = defaults.width or info.default_width, defaults.height or info.default_height
    if Task.GENERATE not in info.tasks:
        width, height = width or SIDE, height or SIDE
        if width * height > limits.max_pixels:
            unit = math.lcm(info.size_multiple, info.token_pixels * info.tokens_multiple)
            width = height = max(unit, math.isqrt(limits.max_pixels) // unit * unit)
    return msgspec.structs.replace(info, default_width=width, default_height=height)


def size_multiple(pipeline: Any) -> int:
    """Return the number of pixels that must divide width and height: whole latents, whole patches, and the pipeline's own checks."""
    patch = max(_patch(getattr(pipeline, "patch_size", None)), _patch(_denoiser_config(pipeline, "patch_size", "all_patch_size")))
    latent = latent_pixels(pipeline)
    steps = [_number(getattr(getattr(pipeline, name, None), "config", {}).get("vae_scale_factor")) or 1 for name in PROCESSORS]
    facts = facts_of(type(pipeline))
    written = [number for text in (facts.divisors if facts else ()) if (number := _product(pipeline, text))]
    return math.lcm(latent * patch * pipeline_record(type(pipeline)).packs, *steps, *written)


def latent_pixels(pipeline: Any) -> int:
    """Return the pixels of one latent along a side; 8 for a pipeline that does not say."""
    return _first_number(pipeline, SPATIAL) or 8


def _product(pipeline: Any, written: str) -> int:
    """Return the product of numbers and settings of a pipeline that a text names, as `vae_scale_factor * 2`; 0 where one is missing."""
    factors = [int(each) if each.isdecimal() else _setting(pipeline, each) for each in written.split(" * ")]
    return math.prod(factor if isinstance(factor, int) else 0 for factor in factors)


def _setting(pipeline: Any, path: str) -> Any:
    return functools.reduce(lambda found, name: getattr(found, name, None), path.split("."), pipeline)


def _result_name(pipeline_class: Any) -> str | None:
    if issubclass(pipeline_class, diffusers.ModularPipeline):
        names = [output.name for output in blocks_of(pipeline_class).outputs]
        return next((name for name in ("images", "videos", "audios") if name in names), None)
    facts = facts_of(pipeline_class)
    return facts.makes if facts else None


def blocks_of(pipeline_class: Any) -> Any:
    """Instantiate the blocks that a modular pipeline class names in `default_blocks_name`, because only an instance lists its outputs."""
    return getattr(diffusers, pipeline_class.default_blocks_name)()


def _written_side(pipeline: Any, takes: Mapping[str, Any]) -> int | None:
    """Return the side in pixels that a class's call makes without a height; None where the call does not say.

    The call names a number, another argument, or the pipeline's default resolution.
    """
    facts = facts_of(type(pipeline))
    for written in facts.sides if facts else ():
        said = pipeline.config.get("default_sample_size") if written == "default_resolution" else takes.get(written)
        if side := _number(int(written) if written.isdecimal() else said):
            return side
    return None


def _default_side(pipeline: Any) -> int | None:
    """Return the side in pixels that the model was trained for, which most pipelines make by default; None where it is unknown."""
    latents = _number(getattr(pipeline, "default_sample_size", None)) or _number(_denoiser_config(pipeline, "sample_size"))
    return latents * latent_pixels(pipeline) if latents else None


def _denoiser_config(pipeline: Any, *names: str) -> Any:
    config: Mapping[str, Any] = next((getattr(part, "config", {}) for name, part in modules_of(pipeline).items() if name in DENOISERS), {})
    found = config if isinstance(config, Mapping) else {}
    return next((found[name] for name in names if found.get(name) is not None), None)


def _patch(size: Any) -> int:
    """Reduce a configured patch size to one number: the largest of a tuple, its time included, and 1 if none is set."""
    if isinstance(size, list | tuple):
        return max((number for item in size if (number := _number(item))), default=1)
    return _number(size) or 1


def _first_number(pipeline: Any, names: tuple[str, ...]) -> int | None:
    return next((number for name in names if (number := _number(getattr(pipeline, name, None)))), None)


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 else None
